"""Finding tensors: in what holds them, and all that there are."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..internals.torch_internals import address

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in a tensor, or in lists, tuples, mappings and data classes, however nested."""
    kind = type(value)
    if kind in PLAIN:  # most arguments of operators
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | deque | UserList):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif found := attributes(value):
        yield from tensors_in(found)


def mapped(kind: Any, function: Callable[[Any], Any], value: Any) -> Any:
    """Return the same with what a function makes of everything of that kind, in plain dicts, lists and tuples."""
    if isinstance(value, kind):
        return function(value)
    if type(value) is dict:
        return {key: mapped(kind, function, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(kind, function, item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple, whose own checks may refuse these
        return value._make(mapped(kind, function, item) for item in value)
    return value


def attributes(value: Any) -> dict[str, Any] | None:
    """Return what a data class (or one of attrs, or a namespace) holds, by name; ``None`` for any other object."""
    kind = type(value)
    if not (dataclasses.is_dataclass(kind) or hasattr(kind, "__attrs_attrs__") or kind is SimpleNamespace):
        return None
    names = dict.fromkeys(getattr(kind, "__dataclass_fields__", ()))
    names |= dict.fromkeys(field.name for field in getattr(kind, "__attrs_attrs__", ()))
    names |= dict.fromkeys(getattr(value, "__dict__", ()))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return where a tensor's numbers lie; ``None`` for a sparse one, or of a lazy layer that has no shape yet."""
    return None if is_lazy(tensor) or tensor.layout is not torch.strided else tensor.untyped_storage()


_INSIDE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor itself, or those of which a sparse one is made."""
    return [getattr(tensor, name)() for name in _INSIDE.get(tensor.layout, ())] or [tensor]


def tensors_of_this_process() -> Iterator[torch.Tensor]:
    """Yield all tensors that Python knows, and gradients."""
    # Python cannot finish a tuple that another thread is building while something holds it: no thread but this runs.
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        # isinstance would wake lazy modules and proxies
        found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    finally:
        sys.setswitchinterval(interval_s)
    for tensor in found:
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def tensors_by_storage(addresses: set[int]) -> dict[int, list[torch.Tensor]]:
    """Return the tensors of this process that lie in these storages, by the address of each."""
    found: dict[int, list[torch.Tensor]] = {place: [] for place in addresses}
    for tensor in tensors_of_this_process():
        if (storage := storage_of(tensor)) is not None and (place := address(storage)) in found:
            found[place].append(tensor)
    return found
