"""Chunks of steps and other requests of training: made, sent, in flight, and waited for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from ...cluster.calls import Call
from ...cluster.ranks import IN_PASSING_S, Posted, Ranks
from ...report.rescue import Rescue
from ...report.run_summary import Evaluation
from ...shared.errors import ClusterDied, GpumemError, TrainingFailed
from ...shared.messages import Chunk, ChunkReply
from ...shared.settings import Settings
from ..compatibility import check_held_out
from ..history import History
from ..ledger_plan import recorded_every
from ..policy import Policy
from ..snapshot_plan import SnapshotPlan
from .stalls import Stalls, cause_of
from .state import TrainingState

CHUNK_S = 1.0
MOST_CHUNK_STEPS = 1000
MOST_IN_FLIGHT = 2
"""The next chunk lies at the ranks when they end one, so that they never wait for the kernel."""
AHEAD_BELOW_S = 1.0
"""Steps that take longer are sent one at a time: a request would wait for two of them, and asking takes 10 ms."""


class Pace:
    """The number of steps in a chunk: few after a flip, when you look closely, then more, which cost less."""

    def __init__(self) -> None:
        self._known: tuple[int, int, float] = (0, 1, math.inf)

    def learn(self, chunk: Chunk, slowest_s: float) -> None:
        """A chunk was done; its slowest rank took ``slowest_s`` seconds for the last step."""
        steps = max(1, min(2 * chunk.steps, MOST_CHUNK_STEPS, int(CHUNK_S / slowest_s)))
        self._known = (chunk.settings_id, steps, slowest_s)

    def steps(self, settings_id: int) -> int:
        """Of the next chunk."""
        known_id, steps, _ = self._known
        return steps if settings_id == known_id else 1

    def most_in_flight(self, settings_id: int) -> int:
        """Chunks that may be at the ranks at once."""
        known_id, _, step_s = self._known
        return MOST_IN_FLIGHT if settings_id == known_id and step_s < AHEAD_BELOW_S else 1


class InFlight:
    """The chunks under way, oldest first. Used under the training lock.

    Attributes:
        nudges: how often the ranks were asked to end the chunk under way.

    Args:
        news: called, on any thread, each time a rank has answered.
    """

    def __init__(self, ranks: Ranks, news: Callable[[], None]) -> None:
        self._ranks = ranks
        self._news = news
        self._chunks: deque[tuple[Chunk, Call]] = deque()
        self._given_up: list[Call] = []
        self._alone: Call | None = None
        self.nudges = 0

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def steps(self) -> int:
        """Steps of all chunks under way."""
        return sum(chunk.steps for chunk, _ in self._chunks)

    @property
    def leftover(self) -> Call | None:
        """A chunk given up on that some rank has yet to answer: its reductions would meet those of another chunk."""
        return next((call for call in self._given_up if call.pending()), None)

    @property
    def calls(self) -> list[Call]:
        """All that is waited for, oldest first."""
        return [*(call for call in self._given_up if call.pending()), *(call for _, call in self._chunks)]

    @property
    def oldest(self) -> Call | None:
        """Return what is waited for first."""
        return next(iter(self.calls), None)

    def free(self, most: int) -> bool:
        """Return whether one more chunk may be sent while there are fewer than ``most``."""
        asked_alone = self._alone is not None and bool(self._alone.pending())
        return self.leftover is None and not asked_alone and len(self._chunks) < most

    def send(self, chunk: Chunk, function: str = "run_chunk", *arguments: Any) -> Call:
        """Send a chunk to ranks that are joined, or another request that takes its turn."""
        call = self._ranks.post(function, *(arguments or (chunk,)))
        call.when_done(self._news)
        self._chunks.append((chunk, call))
        return call

    def holds(self, call: Call) -> bool:
        """Return whether this is a chunk under way."""
        return any(known is call for _, known in self._chunks)

    def ask_alone(self, posted: Posted, function: str, *arguments: Any) -> Call:
        """Ask ranks that are joined something; no chunk is sent until all have answered.

        Ranks that went on training would wait in the next reduction for one that takes long to answer.
        """
        self._alone = self._ranks.post(function, *arguments, posted=posted)
        self._alone.when_done(self._news)
        return self._alone

    def nudge_due(self) -> bool:
        """Return whether the chunks under way would run on for more than a step; counts the nudge that is then sent."""
        if not any(chunk.steps > 1 and chunk.nudges == self.nudges for chunk, _ in self._chunks):
            return False
        self.nudges += 1
        return True

    def left_before_it_began(self, chunk: Chunk) -> None:
        """Ranks had no steps for a chunk, because they had been nudged more often than was counted when it was made.

        Other programs may send that signal too. Chunks that are made from now on are newer than any nudge.
        """
        if chunk.steps and chunk.nudges == self.nudges:
            self.nudges += 1

    def answered(self) -> tuple[Chunk, list[Any]] | None:
        """Return the oldest chunk and its replies in rank order, once all have come; raises the first error at once."""
        if not self._chunks:
            return None
        chunk, call = self._chunks[0]
        if error := call.first_error():
            raise error if isinstance(error, GpumemError) else ClusterDied(str(error))
        return None if call.pending() else (chunk, call.get())

    def take(self) -> Call:
        """Return the oldest chunk, which all ranks have answered, is under way no more."""
        return self._chunks.popleft()[1]

    def give_up(self, forget: bool) -> bool:
        """Expect no answers any more; says whether some ranks still work on what was sent.

        Nothing is sent until they have answered it after all, unless they are gone (``forget``).
        """
        left = [*self._given_up, *(call for _, call in self._chunks)]
        self._given_up = [] if forget else [call for call in left if call.pending()]
        self._chunks.clear()
        return bool(self._given_up)


class Chunks:
    """Makes chunks and sends them. Used under the training lock.

    Attributes:
        latest_id: of the settings that were asked for when the latest chunk was made.

    Args:
        policy: what the session does by itself, as it is now.
    """

    def __init__(
        self,
        state: TrainingState,
        in_flight: InFlight,
        history: History,
        snapshots: SnapshotPlan,
        policy: Callable[[], Policy],
    ) -> None:
        self._state = state
        self._in_flight = in_flight
        self._history = history
        self._snapshots = snapshots
        self._policy = policy
        self.latest_id = 0

    def send(self, steps: int, evaluate: bool = False, traced: bool = False) -> Call:
        """Send a chunk; one without steps applies the settings, and may evaluate.

        Recording where memory goes takes time of its own, which has no place in a trace.
        """
        recorded = 0 if traced else recorded_every(self._policy().ledger_steps, *self._history.step_durations())
        chunk = self._chunk(self._state.settings, self._state.settings_id, steps, ledger_steps=recorded)
        return self._in_flight.send(replace(chunk, evaluate=evaluate, traced=traced))

    def send_turn(self, settings: Settings, settings_id: int, steps: int) -> None:
        """Send steps of autotune, under settings that it tries or those that were asked for."""
        chunk = self._chunk(settings, settings_id, steps)
        self._in_flight.send(replace(chunk, instead_of=self._state.settings.changed_from(settings)))

    def _chunk(self, settings: Settings, settings_id: int, steps: int, ledger_steps: int = 0) -> Chunk:
        self.latest_id = self._state.settings_id
        return Chunk(
            settings,
            settings_id,
            steps,
            self._in_flight.nudges,
            snapshot=self._snapshots.order(self._steps),
            ledger_steps=ledger_steps,
            eval_every=_or_never(self._policy().eval_every),
        )

    def send_trial(self, settings: Settings, trial_id: int) -> None:
        """Ask for a forecast of the next step under these settings, of all of its micro-batches."""
        chunk = Chunk(settings, trial_id, 1, self._in_flight.nudges, trial=True)
        size = settings.batch_size
        self._in_flight.send(chunk, "forecast", settings, [size], [size], 0, False)

    @property
    def none_left_over(self) -> bool:
        """Return whether no rank still works on what was given up: it would meet others in the wrong reduction."""
        return self._in_flight.leftover is None

    @property
    def steps_to_snapshot(self) -> float:
        """The steps that the next chunk may have so as not to pass the moment for a snapshot."""
        return self._snapshots.steps_left(self._steps)

    @property
    def _steps(self) -> int:
        """After which the next chunk begins."""
        return self._history.steps + self._in_flight.steps


def _or_never(every: int | str) -> int:
    return 0 if every == "never" else int(every)


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

    def settle(self) -> None:
        """Let the ranks have the settings that were asked for before the next request, also while they train.

        Raises:
            TrainingFailed: they cannot, or some rank is stuck since the last stall.
        """
        if self._state.wanted_steps and self._chunks.latest_id == self._state.settings_id:
            return
        replies = self._ask(0)
        if not replies or any(reply.failure for reply in replies):
            self._fail(replies, "The ranks did not switch to the settings that were asked for")

    def evaluate(self) -> Evaluation:
        """Evaluate the model."""
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
