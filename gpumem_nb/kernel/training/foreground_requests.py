"""Requests to the ranks between two chunks, which the notebook waits for; training goes on afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from ...cluster.calls import Call
from ...cluster.ranks import IN_PASSING_S, Ranks
from ...report.evaluation import Evaluation
from ...report.rescue import Rescue
from ...shared.errors import TrainingFailed
from ...shared.messages import ChunkReply
from ..compatibility import check_held_out
from ..history import History
from .chunks import Chunks
from .stalls import Stalls, cause_of
from .state import TrainingState


class ForegroundRequests:
    """Requests that are chunks of their own.

    Args:
        check: raises ``TrainingFailed`` while some rank is stuck since the last stall.
        wait: makes way for a chunk that was sent, and waits for it; calls the function that it is given now and then.
    """

    def __init__(
        self,
        ranks: Ranks,
        history: History,
        state: TrainingState,
        chunks: Chunks,
        stalls: Stalls,
        check: Callable[[], None],
        wait: Callable[[Call, Callable[[], None]], None],
    ) -> None:
        self._ranks = ranks
        self._history = history
        self._state = state
        self._chunks = chunks
        self._stalls = stalls
        self._check = check
        self._wait = wait

    def evaluate(self) -> Evaluation:
        """Evaluate the model.

        Raises:
            InvalidInput: there is no validation data.
            TrainingFailed: some rank could not, or is stuck since the last stall.
        """
        if self._state.workload:
            check_held_out(self._state.workload)
        replies = self._ask(0, evaluate=True)
        return Evaluation.of_ranks(replies) or self._fail(replies, "The model was not evaluated")

    def trace(self, steps: int, meanwhile: Callable[[], None]) -> list[ChunkReply]:
        """Train that many steps, and let ranks record them; fewer where an evaluation comes after one of them.

        ``meanwhile`` is called now and then.

        Raises:
            TrainingFailed: a step could not be done, or some rank is stuck since the last stall.
        """
        replies = self._ask(steps, traced=True, meanwhile=meanwhile)
        if not replies or any(reply.failure or not reply.lanes for reply in replies):
            self._state.raise_failure()
            rescue = self._history.rescue  # which training may go on from, in other settings
            if rescue and any(reply.failure == rescue.failure for reply in replies):
                raise TrainingFailed(str(rescue))
            self._fail(replies, "Nothing was traced")
        return replies

    def _ask(
        self,
        steps: int,
        evaluate: bool = False,
        traced: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[ChunkReply]:
        """Return the ranks' replies to a chunk; none where some rank cannot answer."""
        self._ranks.rejoin(IN_PASSING_S)
        with self._state.locked():
            self._check()
            if not self._chunks.none_left_over:
                raise TrainingFailed(
                    "Ranks still work on steps that training gave up. Try again in a moment; if that does not end, "
                    "start them again with %hvd_restart."
                )
            self._stalls.told = False
            if steps:
                self._state.failure = None
            call = self._chunks.send(steps, evaluate, traced)
        self._state.wakeup.notify()
        self._wait(call, meanwhile)
        return [] if call.pending() else call.get()

    def _fail(self, replies: Sequence[ChunkReply], what: str) -> NoReturn:
        failure = cause_of(replies)
        if failure and failure.kind != "stall":
            step = self._history.steps + (failure.phase != "evaluation")
            raise TrainingFailed(Rescue(failure, step, self._state.settings).headline)
        self._state.raise_failure()
        raise TrainingFailed(f"{what}, because its settings had just failed. Try again.")
