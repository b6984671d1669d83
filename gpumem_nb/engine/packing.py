"""A rank's answer, packed for a process that has no GPU and may lack the rank's modules."""

from __future__ import annotations

import io
from typing import Any

from cloudpickle import Pickler
from torch import Tensor, nn

from ..shared.answers import Answer, Apart

_AS_THEY_LIE = ("cpu", "meta")


def returned(value: Any, apart: Apart | None) -> Answer:
    """Return the answer of a request that gave ``value``. Raises whatever pickle does for what cannot be pickled."""
    return Answer(packed(value), describe(value), apart)


def packed(value: Any) -> bytes:
    """Return a pickle of ``value`` in which tensors on a device, however deep they lie, are copies on the CPU."""
    with io.BytesIO() as file:
        _OnCpu(file).dump(value)
        return file.getvalue()


def describe(value: Any) -> str:
    """Return what kind of thing it is, in words: ``a list``, ``a torch.Tensor``."""
    if value is None:
        return "None"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


class _OnCpu(Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        # A parameter is pickled as a tensor with a wrapper, so its tensor comes here by itself.
        if isinstance(obj, Tensor) and not isinstance(obj, nn.Parameter) and obj.device.type not in _AS_THEY_LIE:
            return obj.detach().cpu().requires_grad_(obj.requires_grad).__reduce_ex__(self.proto)
        return super().reducer_override(obj)
