"""The gradient noise scale: how large a batch still pays, from gradients that all ranks have anyway.

McCandlish et al. 2018 (arXiv 1812.06162): B_simple = tr(Sigma) / |G|^2, the variance of single samples' gradients over
the square of the true one. Far below that many samples a step, twice as many do almost the work of two steps; far above
it they add little: it is the critical batch. Both parts follow from squared norms of gradients of two batch sizes
(appendix A.1): each rank's own, and the average of all. Each is averaged over steps by itself, because the mean of
their ratio would be another number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ...internals.torch_internals import norms_of
from .finite import values_of

EVERY_STEPS = 20
_OFFSET = 10  # away from the steps whose memory is recorded
_MEMORY = 0.95  # of the averages, from one measured step to the next


def is_measured(step: int, ranks: int) -> bool:
    """Return whether this step is; the same on all ranks. One rank by itself has one batch size only."""
    return ranks > 1 and step % EVERY_STEPS == _OFFSET


def square_of(params: Iterable[Tensor]) -> Tensor:
    """Return the squared 2-norm of these weights' gradients (one type and device) in fp32, without waiting for it."""
    there = list(params)
    gradients = [values_of(param.grad) for param in there if param.grad is not None]
    norms = norms_of([gradient for gradient in gradients if gradient.numel()])
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=there[0].device)
    return torch.stack(norms).float().square().sum()


class NoiseScale:
    """The estimate of one training, over its latest steps. The same on all ranks.

    Args:
        ranks: how many gradients an average is of.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._noise = self._signal = 0.0

    def add(self, own: float, average: float, samples: int, loss_scale: float = 1.0) -> float | None:
        """Take a step in; returns the noise scale in samples, ``None`` where noise alone is seen.

        Args:
            own: the squared norm of a rank's gradient, the mean of all ranks.
            average: the squared norm of the averaged gradient.
            samples: that one rank's gradient is the mean of.
            loss_scale: what these gradients are multiplied with.
        """
        if not (math.isfinite(own) and math.isfinite(average)) or own <= 0:
            return None
        own, average = own / loss_scale**2, average / loss_scale**2
        large = samples * self._ranks
        signal = (large * average - samples * own) / (large - samples)
        noise = (own - average) / (1 / samples - 1 / large)
        self._signal = _MEMORY * self._signal + (1 - _MEMORY) * signal
        self._noise = _MEMORY * self._noise + (1 - _MEMORY) * noise
        return self._noise / self._signal if self._signal > 0 and self._noise >= 0 else None
