"""Facts about the gradients of a step: finite or not, which weights had one, and how noisy they are.

The noise scale says how large a batch still pays. McCandlish et al. 2018 (arXiv 1812.06162): B_simple = tr(Sigma) /
|G|^2, the variance of single samples' gradients over the square of the true one. Far below that many samples a step,
twice as many do almost the work of two steps; far above it they add little: it is the critical batch. Both parts follow
from squared norms of gradients of two batch sizes (appendix A.1): each rank's own, and the average of all. Each is
averaged over steps by itself, because the mean of their ratio would be another number.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.amp import GradScaler

from ...internals.torch_internals import norms_of
from ...shared.messages import Failure
from .parts import Parts


class GradientNorms:
    """The 2-norms of this rank's gradients, in the types that they are in.

    A bucket that was sent already may hold the average by now: not finite in one is not finite in the other.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        """Measure the gradients of these weights; needs one value of memory for each."""
        self._params = [param for param in params if param.grad is not None and param.numel()]
        self._found: Tensor | None = None
        self._norms = norms_of([values_of(param.grad) for param in self._params if param.grad is not None])

    def nonfinite(self, loss: Tensor, scaler: GradScaler | None) -> Tensor:
        """Return whether the loss or a gradient is not finite, as a tensor on the device, without waiting for it.

        Gradients of a loss that a ``scaler`` has scaled may overflow: it skips their updates and halves its scale. Once
        that is below 1 it is not the scale that makes them infinite.
        """
        if self._norms:
            self._found = ~torch.isfinite(torch.stack([norm.to(loss.device) for norm in self._norms])).all()
            if scaler:
                self._found = self._found & (scaler.scale(torch.ones_like(loss)) < 1)
        return ~torch.isfinite(loss) if self._found is None else ~torch.isfinite(loss) | self._found

    def failure(self, rank: int, parts: Parts) -> Failure | None:
        """Return this rank's failure because of its gradients; ``None`` if all are finite. Waits for the device."""
        if self._found is None or not self._found:
            return None
        names = {id(param): name for name, param in parts.named_parameters()}
        for param, norm in zip(self._params, self._norms, strict=True):
            if not norm.isfinite():
                message = (
                    f"the gradient of {names[id(param)]} became {norm.item()}, though the loss is finite. Look for a "
                    "function without a derivative there (sqrt, norm or log of 0), lower learning_rate or set clip_norm"
                )
                return Failure(rank, "error", "backward", message)
        return None


def values_of(gradient: Tensor) -> Tensor:
    """Of a sparse gradient those that it has, else the gradient."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class GradientsHad:
    """Facts about the steps so far.

    Attributes:
        any_step: whether there was one.
        partial: whether a weight ever had a gradient on some ranks only.
    """

    def __init__(self) -> None:
        self.any_step = self.partial = False
        self._had: set[int] = set()
        self._lacked: set[int] = set()  # on all ranks, and were not frozen
        self._latest: Collection[int] | None = None

    def note(self, params: Sequence[Tensor], absent: Collection[int], partial: bool) -> None:
        """A step counted in which the ``absent`` ones of these weights, by id, had a gradient on no rank."""
        self.any_step, self.partial = True, self.partial or partial
        if absent is self._latest:  # as in the step before
            return
        self._latest = absent
        self._had.update(id(param) for param in params if id(param) not in absent)
        self._lacked.update(id(param) for param in params if id(param) in absent and param.requires_grad)

    def is_news(self, params: Iterable[Tensor]) -> bool:
        """Return whether one of these has a gradient now that had none in any step."""
        return any(param.grad is not None and id(param) not in self._had for param in params)

    def never(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Those that had none in any step, though they were not frozen, and are not."""
        lacked = (param for param in params if param.requires_grad and id(param) in self._lacked)
        return [param for param in lacked if id(param) not in self._had]

    def sometimes(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Those that had one in some steps, and in others on no rank."""
        return [param for param in params if id(param) in self._had and id(param) in self._lacked]


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
