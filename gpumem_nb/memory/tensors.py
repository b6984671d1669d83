"""Finding tensors: in what holds them, and all that there are."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a tensor, or in lists, tuples and dicts, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def tensors_of_this_process() -> Iterator[torch.Tensor]:
    """All tensors that Python knows, and gradients."""
    # Python cannot finish a tuple that another thread is building while somebody holds it, so nobody else runs here.
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
