"""A check that gradients are finite numbers, made before the update without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable

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
