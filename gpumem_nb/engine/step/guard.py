"""A guard against a loss that trains by itself: it must not update weights, or run a backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...shared.errors import WorkloadError

_INSTEAD = (
    "return the loss, and leave zero_grad(), backward() and step() to the training step. A step with several updates, "
    "as a GAN's, can be written in a %%hvd cell with hvd.DistributedOptimizer."
)


@contextmanager
def updates_refused() -> Iterator[None]:
    """Inside, any optimizer's ``step()`` raises ``WorkloadError`` before it changes anything.

    Its weights would be updated without the other ranks' gradients, and in steps that are undone too.
    """
    hook = register_optimizer_step_pre_hook(_refuse)
    try:
        yield
    finally:
        hook.remove()


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> NoReturn:
    raise WorkloadError(f"The loss calls {type(optimizer).__name__}.step() by itself: {_INSTEAD}")


def check_no_backward(latest: Tensor | None) -> None:
    """After the loss was computed: ``latest`` is the weight that got a gradient meanwhile, if one did.

    Raises:
        WorkloadError: one did. Its gradient would be averaged with that of the step, in part or twice.
    """
    if latest is not None:
        raise WorkloadError(f"The loss calls backward() by itself: {_INSTEAD}")
