"""A check that a block does the same when it is run once more: compared now and then, because it costs a little."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...memory.tensors import tensors_in

_FIRST_CALLS, _EACH_CALLS = 1, 64  # that are compared
_ELEMENTS = 64  # of each result
_TOLERANCE = 1e-2  # of the largest element: some of CUDA's operators add up in any order


def is_compared(calls: int) -> bool:
    """Return whether the replay of a block that was called so often before is to be compared."""
    return calls < _FIRST_CALLS or calls % _EACH_CALLS == 0


class Fingerprint:
    """Samples of a block's output, and how many tensors autograd had saved by then."""

    def __init__(self, output: Any, saved: int) -> None:
        self._samples = [_sample(tensor) for tensor in tensors_in(output)]
        self._saved = saved

    def is_of(self, output: Any, saved: int) -> bool:
        """Return whether a block that was run once more did the same."""
        samples = [_sample(tensor) for tensor in tensors_in(output)]
        return saved == self._saved and len(samples) == len(self._samples) and all(map(_alike, self._samples, samples))


def _sample(tensor: Tensor) -> Tensor:
    """Some elements from all over a tensor, as 64-bit numbers."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return torch.zeros(0, dtype=torch.float64)
    indices = torch.arange(0, tensor.numel(), max(1, tensor.numel() // _ELEMENTS), device=tensor.device)
    places = torch.unravel_index(indices, tensor.shape) if tensor.dim() else ()
    return tensor.detach()[places].abs().double()


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    largest = one.nan_to_num().max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)
