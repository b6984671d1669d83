"""The response to a failed step: back to settings that work, or on with smaller ones; trials of what would have fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...planning import fit
from ...planning.instead import Search, as_fit, instead_of
from ...planning.prediction import FITS
from ...report.differences import NOT_KNOWN, typed
from ...report.rescue import Rescue
from ...shared.categories import ACTIVATIONS, OPTIMIZER_STATE
from ...shared.errors import TrainingFailed
from ...shared.forecast import RECORDED, Forecasts
from ...shared.knobs.step import shortened, shrunk
from ...shared.messages import Chunk, Failure, Sample
from ...shared.settings import Settings
from ...shared.workload import Handles, Splits
from .. import compatibility
from ..history import History
from ..policy import Policy
from .state import TrainingState


class Tryout:
    """Tries candidates in place of settings that ran out of memory, on the very step that failed.

    Each is judged by ``planning/fit.py``, like any other settings, from a forecast of the micro-batches of that step
    and no others, and with the optimizer's state, which the first step does not have yet.

    Args:
        rescue: of the step that ran out of memory; what is found out is added to it.
        handles: what knobs that free memory can take hold of.
        usable: whether settings go with what is loaded.
        limit_bytes: of the rank that failed; ``None`` where it has none.
        splits: what is known of training micro-batches in parts.

    Attributes:
        rescue: as given.
        search: which candidates are tried, and what came of them.
        shown: the settings of the trial under way.
    """

    def __init__(
        self,
        rescue: Rescue,
        handles: Handles,
        usable: Callable[[Settings], bool] = lambda settings: True,
        limit_bytes: int | None = None,
        splits: Splits = NOT_KNOWN,
    ) -> None:
        self.rescue, self._splits = rescue, splits
        rescue.looking = True
        at_peak = _filled_by(rescue.failure, limit_bytes or 0)
        self.search = Search(rescue.settings, rescue.failure.phase, handles, at_peak, usable)
        self._candidate = self.shown = rescue.settings
        self._warm = False

    def next(self) -> Settings | None:
        """Return the settings to try next; nothing when that was all."""
        candidate = self.search.next()
        if candidate is None:
            if self.rescue.instead:
                self.rescue.instead = replace(self.rescue.instead, unfinished=False)
            return None
        # The update's memory does not depend on the micro-batches; any of them may be what is too large elsewhere.
        of_update = self.rescue.failure.phase == "update"
        self._candidate, self.shown = candidate, shortened(candidate) if of_update else candidate
        return self.shown

    def learn(self, answers: Sequence[Forecasts]) -> None:
        """Take in forecasts of the latest candidate; a failure that is not ``oom`` says nothing of memory.

        The first trial warms up, so how long it takes says nothing.
        """
        timed, self._warm = self._warm and self.shown == self._candidate, True
        kinds = {answer.failure.kind for answer in answers if answer.failure}
        if not (kinds <= {"oom"} and (kinds or all(answer.of for answer in answers))):
            return
        seconds = max(answer.seconds for answer in answers)
        # Samples may differ in size, but these are the very ones of the step that is tried again.
        exact = [replace(one, of=tuple(replace(each, how=RECORDED) for each in one.of)) for one in answers]
        said = fit.of_ranks(exact, self._candidate, [self._candidate.batch_size], seconds)
        self.search.learn(said, seconds if timed else None)
        rescue = self.rescue
        tried, splits = self.search.tried, self._splits
        rescue.instead = instead_of(
            rescue.settings, rescue.ranks, tried, on_the_step=True, splits=splits, unfinished=True
        )


_MUCH = 1 / 3  # of the limit, for the optimizer's state to be worth trying with less


def _filled_by(failure: Failure, limit_bytes: int) -> dict[str, int] | None:
    """Return what filled the limit when another part than the update ran out, if the optimizer's state did so, too."""
    state = failure.live.held.get(OPTIMIZER_STATE, 0) if failure.live else 0
    if failure.phase == "update" or not state or state < _MUCH * limit_bytes:
        return None
    return {ACTIVATIONS: max(1, limit_bytes - state), OPTIMIZER_STATE: state}


TRIAL_ID = -2  # and below: trials are not configurations of their own


class Failures:
    """Decides how training goes on when a step could not be finished. Used under the training lock.

    Args:
        policy: what the session does by itself, as it is now.
        send: sends a chunk of so many steps under the settings that training went on with.
        send_trial: asks for a forecast of one step under other settings; the number is the trial's own.
    """

    def __init__(
        self,
        history: History,
        state: TrainingState,
        policy: Callable[[], Policy],
        send: Callable[[int], object],
        send_trial: Callable[[Settings, int], None],
    ) -> None:
        self._history = history
        self._state = state
        self._policy = policy
        self._send = send
        self._send_trial = send_trial
        self._tryout: Tryout | None = None

    @property
    def trying_out(self) -> bool:
        """Return whether it is still being found out what would have fit."""
        return self._tryout is not None

    def handle(self, failure: Failure, chunk: Chunk, apart: bool = False) -> None:
        """Go on with other settings, as the policy says; without any, or when they are not to blame, stop.

        ``apart``: the ranks have to join again before they can try anything out.
        """
        if failure.phase == "evaluation":
            self._not_evaluated(failure, chunk)
            return
        newer = chunk.settings_id != self._state.settings_id  # other settings were asked for meanwhile
        if failure.kind == "interrupted":
            if self._state.wanted_steps:  # training was not paused: the signal was of an earlier interrupt
                self._state.note(f"An interrupt reached rank {failure.rank} late: a step was discarded. Train again.")
            self._state.stop()
            if not newer:
                self._state.adopt(self._state.settings)
            return
        rescue = self._rescue(failure, chunk)
        rescue.apart = apart
        if failure.kind == "diverged":
            self._state.stop(rescue)
            rescue.did = "training paused"
            if not newer:
                self._state.adopt(self._state.settings)
            return
        other = None if newer else self._way_out(failure, chunk.settings)
        shrinks = other is not None and self._policy().on_oom == "shrink" and other == shrunk(chunk.settings)
        if failure.kind == "oom" and not shrinks and not apart:
            self._try_out(rescue)
        if other:
            self._go_on(rescue, other, shrinks)
        elif not newer:
            self._state.adopt(self._state.settings)
        if failure.kind == "error" or not (other or newer):
            self._state.stop(rescue)
            rescue.did = rescue.did or "training stopped"
        if other and not self._state.wanted_steps:
            self._send(0)  # nothing is trained under it, so that it is applied by itself

    def worked(self, chunk: Chunk, done: Sequence[Sample]) -> None:
        """Steps were done, perhaps the first under smaller settings that a rescue went on with."""
        if self._history.rescue:
            self._history.rescue.worked(chunk.settings, max(sample.live_peak_bytes for sample in done))

    def learn(self, chunk: Chunk, answers: Sequence[Forecasts]) -> None:
        """Take in the forecasts of a trial, and try the next one."""
        if {answer.failure.kind for answer in answers if answer.failure} & {"stall", "interrupted"}:
            self.end_tryout()
        elif self._tryout and self._tryout.shown == chunk.settings:  # and no trial in place of what ran out before
            self._tryout.learn(answers)
            self._try_next(chunk.settings_id - 1)
        self._history.tried_out()

    def end_tryout(self) -> None:
        """Try nothing more."""
        if self._tryout:
            self._tryout.rescue.looking = False
        self._tryout = None

    def _not_evaluated(self, failure: Failure, chunk: Chunk) -> None:
        """The settings are not to blame. Training pauses, unless this very evaluation was asked for."""
        if failure.kind == "interrupted":
            self._state.stop()
            return
        what = Rescue(failure, self._history.steps, chunk.settings).headline
        self._history.mark(failure.kind, what)
        if chunk.steps:
            self._state.stop(
                TrainingFailed(
                    f"{what}\nThe model is as it was before the evaluation, and training paused. %hvd_set "
                    "eval_every=never trains without it."
                )
            )

    def _rescue(self, failure: Failure, chunk: Chunk) -> Rescue:
        self._history.failed(chunk.settings_id, failure.kind)
        rescue = Rescue(
            failure,
            self._history.steps + 1,
            chunk.settings,
            now=self._state.settings,
            ranks=self._history.size,
            model_version=self._history.model_version,
        )
        self._history.rescued(rescue)
        self._state.note(rescue)
        return rescue

    def _way_out(self, failure: Failure, failed: Settings) -> Settings | None:
        """Settings to go on with, or to go back to before stopping."""
        on_oom = self._policy().on_oom
        if failure.kind == "oom" and on_oom == "stop":
            return None
        if failure.kind == "oom" and on_oom == "shrink" and failure.phase not in ("settings", "update"):
            return shrunk(failed)
        works = self._state.applied if failure.phase == "settings" else self._state.proven
        return works if works and failed.changed_from(works) else None

    def _go_on(self, rescue: Rescue, other: Settings, shrinks: bool) -> None:
        rescue.goes_on = other if shrinks else None
        rescue.did = f"training {'goes on with' if shrinks else 'went back to'} {typed(rescue.settings, other)}"
        self._state.adopt(other)
        self._history.mark("note", rescue.did.removeprefix("training "))

    def _try_out(self, rescue: Rescue) -> None:
        """Find out on the ranks which settings would have fit; what they answer is added to the rescue."""
        workload, ranks = self._state.workload, self._history.size

        def usable(settings: Settings) -> bool:
            return compatibility.usable(settings, workload, ranks)

        reading = self._history.readings[rescue.failure.rank]
        limit_bytes = reading.limit_bytes if reading else None
        self.end_tryout()  # of what ran out before
        handles, splits = workload.handles if workload else Handles(), self._history.answers.splits(workload)
        self._tryout = Tryout(rescue, handles, usable, limit_bytes, splits)
        foreseen = [one for settings in self._tryout.search.mild if (one := self._history.foreseen.get(settings))]
        rescue.foreseen = [as_fit(one) for one in foreseen if one.verdict == FITS]
        self._try_next(TRIAL_ID)

    def _try_next(self, trial_id: int) -> None:
        settings = self._tryout.next() if self._tryout else None
        if settings:
            self._send_trial(settings, trial_id)
        else:
            self.end_tryout()
