"""Autotune: while it is on, training goes on in turns under settings that may be faster, until it is known which."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from ...planning.tuning.communication import Search, search
from ...report.configurations import Autotuned
from ...report.differences import arrows, typed
from ...report.speed import WARM_UP_STEPS
from ...shared.errors import InvalidInput
from ...shared.messages import Chunk, Failure, Sample
from ...shared.settings import Settings
from ...shared.workload import WorkloadInfo
from .. import compatibility
from ..history import History
from ..policy import Policy
from .chunks import Chunks
from .state import TrainingState

_TURN_S = 0.3
_LEAST_STEPS, _MOST_STEPS = 4, 6  # of a turn, after the first ones under other settings
_WHERE_THEY_FAIL = ("settings", "reduction")  # elsewhere an error is the model's own


class Autotune:
    """Gives a :data:`search` its steps. Its turns are real steps of training. Used under the training lock.

    It begins anew when other settings are asked for or something else is loaded. Where something comes between two
    parts of a turn, such as a cell that may have changed the model, this turn begins anew.

    Args:
        policy: what the session does by itself, as it is now.
        over: called when nothing is left to be found.
    """

    def __init__(
        self,
        history: History,
        state: TrainingState,
        chunks: Chunks,
        policy: Callable[[], Policy],
        over: Callable[[], None],
    ) -> None:
        self._history = history
        self._state = state
        self._chunks = chunks
        self._policy = policy
        self._over = over
        self._of: tuple[int, Settings] | None = None
        self._model_version = 0
        self._search: Search
        self._turn = state.settings
        self._warm_up = WARM_UP_STEPS
        self._rates: list[float] = []  # of the turn's steps, samples/s of all ranks
        self._ids: dict[Settings, int] = {}
        self._steps_taken = 0

    @property
    def on(self) -> bool:
        """Return whether the next chunk is one of its turns."""
        return self._policy().autotune and self._state.workload is not None

    def __str__(self) -> str:
        """Return what it is at, behind what training does; empty while it is off."""
        if not self.on:
            return ""
        now = typed(self._state.settings, self._turn) if self._of else ""
        return f", autotune ({now or 'the present settings'}; steps so far: {self._steps_taken})"

    def send(self, most: float) -> bool:
        """Send a part of the turn, of at most so many steps; says whether it is on."""
        if not self.on:
            self._stop()
            return False
        if self._of != self._now:
            self._begin()
        elif self._model_version != self._history.model_version:
            self._begin_turn(self._turn)
        state = self._state
        self._ids[state.settings] = state.settings_id
        if self._turn not in self._ids:
            self._ids[self._turn] = state.number(self._turn)
            self._history.tries(self._ids[self._turn], self._workload.name, self._turn)
        self._chunks.send_turn(self._turn, self._ids[self._turn], int(min(most, self._steps_left())))
        return True

    def learn(self, chunk: Chunk, samples: Sequence[Sample], failure: Failure | None) -> bool:
        """Take in a chunk, perhaps a part of a turn; says whether it failed by what was tried alone."""
        not_possible = chunk.tried and failure is not None and _is_of_settings(failure)
        if failure and self._ids.get(chunk.settings) == chunk.settings_id:
            del self._ids[chunk.settings]  # which the ranks hold for broken
        if not self.on or self._of != self._now:
            self._stop()
            return not_possible
        if chunk.settings != self._turn or chunk.traced or not chunk.steps:
            self._begin_turn(self._turn)  # something came between
            return not_possible
        by_step: dict[int, list[float]] = defaultdict(list)
        for sample in samples:
            by_step[sample.step].append(sample.samples_per_s)
        self._rates += [sum(rates) for rates in by_step.values()]
        self._steps_taken += len(by_step)
        if not_possible and failure:
            what = typed(self._state.settings, self._turn)
            self._history.mark("note", f"autotune: {what} is not possible: {failure.message}")
            self._next(None)
        elif not failure and self._steps_left() <= 0:
            self._next(statistics.median(self._rates[self._warm_up :]))
        return not_possible

    @property
    def _now(self) -> tuple[int, Settings]:
        return self._history.loaded_as, self._state.settings

    @property
    def _workload(self) -> WorkloadInfo:
        assert self._state.workload is not None
        return self._state.workload

    def _begin(self) -> None:
        workload, settings = self._workload, self._state.settings

        def usable(rival: Settings) -> bool:
            try:
                compatibility.check(rival, workload, self._history.size)
            except InvalidInput:
                return False
            return True

        self._of, self._ids, self._steps_taken = self._now, {}, 0
        self._search = search(settings, workload.parameter_bytes, usable)
        self._begin_turn(next(self._search))
        self._history.mark("note", "autotune: looking for the fastest of Horovod's settings")

    def _begin_turn(self, turn: Settings, warm_up: int = WARM_UP_STEPS) -> None:
        self._turn, self._warm_up, self._rates = turn, warm_up, []
        self._model_version = self._history.model_version

    def _next(self, rate: float | None) -> None:
        """The turn is over; go on with the next one, or with what was found."""
        before = self._turn
        try:
            turn = self._search.send(rate)
        except StopIteration as end:
            self._end(end.value)
        else:
            self._begin_turn(turn, 0 if turn == before else WARM_UP_STEPS)

    def _stop(self) -> None:
        """Forget the search before it has ended."""
        if self._of is not None:
            self._history.tries_no_more()
        self._of = None

    def _end(self, found: Autotuned) -> None:
        self._of = None
        self._over()
        if found.found != found.start:
            self._state.adopt(found.found)
            self._history.mark("flip", arrows(found.start, found.found))
        said = f"{found} It took {self._steps_taken} steps."
        self._history.autotune_ended(said)
        self._state.note(said)

    def _steps_left(self) -> int:
        """Until the turn is over; as many as are known to be needed so far."""
        done, wanted = len(self._rates), _LEAST_STEPS
        if done > self._warm_up:
            step_s = self._state.settings.samples_per_rank * self._history.size / statistics.median(self._rates)
            wanted = min(max(math.ceil(_TURN_S / step_s), _LEAST_STEPS), _MOST_STEPS)
        return self._warm_up + wanted - done


def _is_of_settings(failure: Failure) -> bool:
    return failure.phase != "evaluation" and (
        failure.kind == "oom" or (failure.kind == "error" and failure.phase in _WHERE_THEY_FAIL)
    )
