"""Bringing a batch to the device."""

from __future__ import annotations

from collections import UserDict, UserList, deque
from collections.abc import Mapping, MutableMapping
from copy import copy as shallow_copy
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...memory.tensors import attributes


def to_device(batch: Any, device: torch.device, copy: bool = False) -> Any:
    """Return the batch with every tensor in it on the device, in containers of the same types.

    Looks into mappings, lists, tuples and data classes, however nested; an object with a method ``to`` moves itself.
    The containers of ``batch`` itself stay as they are.

    Args:
        batch: what a data set or a loader gave.
        device: where its tensors go.
        copy: copy a tensor even if it is on the device already: a virtual GPU does not count memory that another
            process has shared, and a real one would hold a copy too.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True, copy=copy)
    if type(batch) is dict:
        return {key: to_device(value, device, copy) for key, value in batch.items()}
    # Such as transformers' BatchEncoding, whose own ``to`` changes the batch that the data set may keep.
    if isinstance(batch, dict | UserDict) or (isinstance(batch, Mapping) and (copy or not hasattr(batch, "to"))):
        return _like(batch, {key: to_device(value, device, copy) for key, value in batch.items()})
    if hasattr(batch, "to"):
        return batch.to(device)
    if type(batch) is list:
        return [to_device(value, device, copy) for value in batch]
    if isinstance(batch, tuple):
        moved = [to_device(value, device, copy) for value in batch]
        same = all(new is old for new, old in zip(moved, batch, strict=True))
        return batch if same else tuple.__new__(type(batch), moved)  # a named tuple's own checks may refuse these
    if isinstance(batch, list | deque | UserList):
        filled = shallow_copy(batch)
        for index, value in enumerate(batch):
            filled[index] = to_device(value, device, copy)
        return filled
    if (found := attributes(batch)) is not None:
        changed = shallow_copy(batch)
        for name, value in found.items():
            object.__setattr__(changed, name, to_device(value, device, copy))  # also of a frozen one
        return changed
    return batch


def _like(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Mapping[Any, Any]:
    """``moved`` in a mapping of the type of ``batch``, with what else that has: a default factory, say."""
    if isinstance(batch, MappingProxyType):
        return MappingProxyType(moved)
    if not isinstance(batch, MutableMapping):
        return type(batch)(moved)  # type: ignore[call-arg]
    filled = shallow_copy(batch)
    for key, value in moved.items():
        filled[key] = value
    return filled
