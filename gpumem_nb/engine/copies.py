"""Finding tensors in what holds them, and copying them into host memory that no device counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in lists, tuples and dicts, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in memory of NumPy's, which the virtual GPU rightly does not count: on a GPU it would be the host's."""
    host = torch.from_numpy(np.empty(tensor.numel() * tensor.element_size(), dtype=np.uint8))
    return host.view(tensor.dtype).reshape(tensor.shape).copy_(tensor.detach())
