"""Autotune: while it is on, training goes on in turns under settings that may be faster, until it is known which."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from ...report.autotuned import Autotuned
from ...report.differences import arrows, typed
from ...report.speed import WARM_UP_STEPS
from ...shared.errors import InvalidInput
from ...shared.messages import Chunk, Failure, Sample
from ...shared.settings import Settings
from .. import compatibility
from ..history import History
from ..policy import Policy
from ..search import Search, search
from .chunks import Chunks
from .state import TrainingState

_TURN_S = 0.3
_LEAST_STEPS, _MOST_STEPS = 4, 6  # of a turn, after the first ones under other settings
_MAY_BE_THE_SETTINGS = {"oom", "error"}  # a step that fails leaves the training state as it was


class Autotune:
    """Gives a :data:`search` its steps. Its turns are real steps of training. Used under the training lock.

    It begins anew when other settings are asked for or cells may have changed the model.

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
        self._of: tuple[int, int] | None = None
        self._search: Search
        self._turn = state.settings
        self._warm_up = WARM_UP_STEPS
        self._rates: list[float] = []  # of the turn's steps, samples/s of all ranks
        self._ids: dict[Settings, int] = {}
        self._steps_taken = 0

    @property
    def on(self) -> bool:
        """Whether the next chunk is one of its turns."""
        return self._policy().autotune and self._state.workload is not None

    def __str__(self) -> str:
        """What it is at, behind what training does; empty while it is off."""
        if not self.on:
            return ""
        now = typed(self._state.settings, self._turn) if self._of else ""
        return f", autotune ({now or 'the present settings'}; {self._steps_taken} steps so far)"

    def send(self, most: float) -> bool:
        """Send a part of the turn, of at most so many steps; says whether it is on."""
        if not self.on:
            return False
        of = self._state.settings_id, self._history.model_version
        if of != self._of:
            self._begin(of)
        if self._turn not in self._ids:
            self._ids[self._turn] = self._state.number(self._turn)
        self._chunks.send_turn(self._turn, self._ids[self._turn], int(min(most, self._steps_left())))
        return True

    def learn(self, chunk: Chunk, samples: Sequence[Sample], failure: Failure | None) -> bool:
        """Take in a part of a turn; says whether its failure may be that of the settings, and none of training."""
        of_settings = bool(failure and failure.kind in _MAY_BE_THE_SETTINGS and failure.phase != "evaluation")
        not_possible = chunk.tried and of_settings
        if not self.on or not self._of or self._of[0] != self._state.settings_id or chunk.settings != self._turn:
            return not_possible
        by_step: dict[int, list[float]] = defaultdict(list)
        for sample in samples:
            by_step[sample.step].append(sample.samples_per_s)
        self._rates += [sum(rates) for rates in by_step.values()]
        self._steps_taken += len(by_step)
        if failure and chunk.tried:
            del self._ids[self._turn]  # which the ranks hold for broken
            what = typed(self._state.settings, self._turn)
            if not_possible:
                self._history.mark("note", f"autotune: {what} is not possible: {failure.message}")
                self._next(None)
            elif failure.kind not in ("interrupted", *_MAY_BE_THE_SETTINGS):
                self._end(f"Autotune was given up, because a step with {what} failed.")
        elif not failure and self._steps_left() <= 0:
            self._next(statistics.median(self._rates[self._warm_up :]))
        return not_possible

    def _begin(self, of: tuple[int, int]) -> None:
        state = self._state
        assert state.workload is not None
        workload, ranks = state.workload, self._history.size

        def usable(settings: Settings) -> bool:
            try:
                compatibility.check(settings, workload, ranks)
            except InvalidInput:
                return False
            return True

        self._of, self._ids, self._steps_taken = of, {state.settings: state.settings_id}, 0
        self._search = search(state.settings, workload.parameter_bytes, usable)
        self._turn, self._rates, self._warm_up = next(self._search), [], WARM_UP_STEPS
        self._history.mark("note", "autotune: looking for the fastest of Horovod's settings")

    def _next(self, rate: float | None) -> None:
        """The turn is over; go on with the next one, or with what was found."""
        try:
            before, self._turn = self._turn, self._search.send(rate)
            self._rates, self._warm_up = [], 0 if self._turn == before else WARM_UP_STEPS
        except StopIteration as end:
            self._found(end.value)

    def _found(self, found: Autotuned) -> None:
        before = self._state.settings
        self._state.adopt(found.found)
        if found.found != before:
            self._history.mark("flip", arrows(before, found.found))
        self._end(f"{found} It took {self._steps_taken} steps.")

    def _end(self, why: str) -> None:
        self._of = None
        self._over()
        self._history.mark("note", why)
        self._state.note(why)

    def _steps_left(self) -> int:
        """Until the turn is over; as many as are known to be needed so far."""
        done, wanted = len(self._rates), _LEAST_STEPS
        if done > self._warm_up:
            step_s = self._state.settings.samples_per_rank * self._history.size / statistics.median(self._rates)
            wanted = min(max(math.ceil(_TURN_S / step_s), _LEAST_STEPS), _MOST_STEPS)
        return self._warm_up + wanted - done
