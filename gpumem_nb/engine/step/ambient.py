"""State that torch keeps for the whole thread, put back after an exception in the middle of a step."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import torch

from ...internals.torch_internals import count_modes, innermost_hooks, leave_autocast, leave_hooks, leave_mode


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
