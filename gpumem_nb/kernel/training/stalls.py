"""The response to a stall: pause training, tell the cause, and interrupt ranks that others were freed from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...cluster.calls import Call
from ...cluster.ranks import Ranks
from ...report import waits
from ...report.waits import WaitReport
from ...shared.errors import TrainingFailed
from ...shared.forecast import Forecasts
from ...shared.messages import ChunkReply, Failure
from ...shared.units import name_ranks
from ..history import History
from .state import TrainingState

LATE_TIMEOUT_S = 4.0  # a busy machine may take long over the end of a cell and what comes next


class Stalls:
    """Looks after chunks that are not answered.

    Attributes:
        told: ranks came apart, and it has been told.
        stuck: why a chunk may never be answered; empty while it may.

    Args:
        limit_s: how long ranks wait for one another, asked anew each time.
    """

    def __init__(self, ranks: Ranks, history: History, state: TrainingState, limit_s: Callable[[], float]) -> None:
        self._ranks = ranks
        self._history = history
        self._state = state
        self._limit_s = limit_s
        self.told = False
        self.stuck = ""
        self._late_s = math.inf  # since when ranks are interrupted that others were freed from

    def all_answered(self) -> None:
        """No rank has a chunk left that it has not answered, or it was answered at last."""
        self.stuck, self._late_s = "", math.inf

    def look_after(self, call: Call) -> None:
        """Interrupt ranks whose step the others have been freed from; one that is out of reach is named."""
        if self._report(call):
            if not self.told:
                if call.finished(0.5):  # ranks that waited together are freed together
                    return  # what they answered says more
                self.tell(call)
            self._interrupt_late(call)
        elif not self.stuck and waits.out_of_reach(call.pulses()):
            report = waits.now(self._ranks.pulses(), self._ranks.pending(), self._ranks.size)
            self._strand(f"{report}, and could not be freed")

    def tell(self, call: Call) -> None:
        """Pause and say who waited for whom: the settings are not to blame."""
        report = self._report(call)
        why = (
            f"{report} (stall_limit_s={self._limit_s():g})"
            if report
            else "Horovod was shut down while ranks trained, by a cell or by the model's own code"
        )
        with self._state.locked():
            self.told = True
            self._state.stop(
                TrainingFailed(
                    f"{why}.\nWhat was under way was discarded on all ranks, which join again by themselves, and "
                    "training paused. Fix the cause, then go on with %hvd_play."
                )
            )
        self._state.wakeup.notify()
        self._history.mark("stall", why)

    def _interrupt_late(self, call: Call) -> None:
        # A cell from before, with which a rank is still busy, is not the step's business to end.
        begun, busy = call.pulses(), self._ranks.pulses()
        late = [rank for rank in call.pending() if rank in begun or rank not in busy]
        if not late:
            self._late_s = math.inf
        elif not self.stuck:
            self._late_s = min(self._late_s, time.monotonic())

            def left() -> list[int]:
                return [rank for rank in late if rank in call.pending()]

            self._ranks.interrupt_until(call.finished, left)
            if (ranks := left()) and time.monotonic() - self._late_s > LATE_TIMEOUT_S:
                self._strand(f"{name_ranks(ranks)} could not be interrupted")

    def _report(self, call: Call) -> WaitReport | None:
        """Return who waited for whom when the ranks came apart in this chunk, if they did."""
        apart = call.apart()
        return waits.ended(apart, self._ranks.pulses(), call.pending(), self._ranks.size) if apart else None

    def _strand(self, why: str) -> None:
        """A chunk may never be answered: no call shall wait for it."""
        with self._state.locked():
            self.told = True
            self.stuck = f"{why}. Start the ranks again with %hvd_restart."
            before = f"{self._state.failure}\n" if self._state.failure else ""
            self._state.stop(TrainingFailed(f"{before}{self.stuck}"))
        self._state.wakeup.notify()
        self._history.mark("stall", why)


def came_apart(replies: Sequence[ChunkReply] | Sequence[Forecasts]) -> bool:
    """Return whether the ranks came apart, and no rank's own failure is the cause."""
    failure = cause_of(replies)
    return failure is not None and failure.kind == "stall"


def cause_of(replies: Sequence[ChunkReply] | Sequence[Forecasts]) -> Failure | None:
    """Return why a step failed: what a rank could not do, before that others waited for it.

    A rank that the others were freed from is interrupted afterwards: that is no cause.
    """
    failures = [reply.failure for reply in replies if reply.failure]
    order = {"stall": 1, "interrupted": 2}
    first = min(failures, key=lambda failure: order.get(failure.kind, 0), default=None)
    said = {(failure.kind, failure.message) for failure in failures}
    return first and replace(first, everywhere=len(failures) == len(replies) and len(said) == 1)
