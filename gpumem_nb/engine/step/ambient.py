"""State around a forward pass: autocast, no updates by the loss, and torch's modes put back after an error."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...internals.torch_dispatch_internals import count_modes, leave_mode
from ...internals.torch_internals import innermost_hooks, leave_autocast, leave_hooks
from ...shared.errors import WorkloadError


class Ambient:
    """Modes of the calling thread at one moment: between steps, when nothing of a step is under way.

    An interrupt can hit inside a context manager's ``__enter__``, after it switched a mode on and before Python will
    call its ``__exit__``. Autocast's depth would then never come back to zero, and its cached copies of the weights
    would be used, out of date, for ever.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = {device: _autocast(device) for device in ("cpu", "cuda")}
        self._hooks = innermost_hooks()
        self._modes = count_modes()

    def restore(self) -> None:
        """Put everything back, and let go of what the unfinished forward and backward keep alive."""
        torch.set_grad_enabled(self._grad)
        for device, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        leave_autocast()
        while (top := innermost_hooks()) is not None and top != self._hooks:
            leave_hooks()
        for _ in range(count_modes() - self._modes):
            leave_mode()
        _empty_ready_queue()


def behind(error: BaseException) -> list[BaseException]:
    """Return an exception and all that hangs on it, the nearest first: causes, contexts and the members of groups."""
    found = [error]
    for one in found:
        members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        for other in (one.__cause__, one.__context__, *members):
            if other is not None and not any(other is known for known in found):
                found.append(other)
    return found


def let_go(error: BaseException) -> None:
    """Drop what an exception and those behind it keep alive: the frames of their tracebacks hold activations."""
    for one in behind(error):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def _empty_ready_queue() -> None:
    """A backward that raised leaves the nodes that were ready in its thread's queue, and the graph with them.

    The next backward drops those of higher priority than its own nodes. Priorities are numbers that each thread counts
    for itself, so the nodes of a new thread come last.
    """
    last: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: last.append(torch.ones(1, device="cpu", requires_grad=True).sum()))
    thread.start()
    thread.join()
    last[0].backward()


def _autocast(device: str) -> tuple[bool, Any]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


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


def check_no_backward(came: Collection[Tensor]) -> None:
    """After the loss was computed: ``came`` are the weights that got a gradient meanwhile.

    Raises:
        WorkloadError: some did. Their gradients would be averaged with those of the step, in part or twice.
    """
    if came:
        raise WorkloadError(f"The loss calls backward() by itself: {_INSTEAD}")


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "bf16_weights": torch.bfloat16}


def autocast(precision: str, device_type: str) -> AbstractContextManager[object]:
    """Return the context of a forward pass under this precision, whatever type weights are in."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=DTYPES[precision])
