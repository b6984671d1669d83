"""Measures settings for the tuner: by small steps what they need, by whole ones how fast they are, all undone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..planning.score import Asked
from ..planning.tuning.record import Candidate, Record, speed_of, within
from ..planning.tuning.result import TuneResult
from ..planning.tuning.search import search
from ..planning.tuning.space import Space, space
from ..report.differences import typed
from ..shared.errors import InvalidInput, NotThisTime, WorkloadError
from ..shared.forecast import SMALL
from ..shared.knobs.batch import shortened
from ..shared.progress import Progress
from ..shared.settings import Settings
from ..shared.units import format_rate, parse_size
from . import compatibility
from .foreground import Foreground
from .history import History
from .predicting import Predicting
from .training import Training

LEAST_S, MOST_S = 1.0, 86400.0
_HOPELESS, _HOPELESS_S = 4, 1.0  # times as long as other small steps, and so long at least


class Changed(Exception):
    """What is trained changed while it was being tuned."""


class Tuning:
    """Tunes what the ranks of one cluster train; training that goes on does so between the trials."""

    def __init__(self, foreground: Foreground, training: Training, predicting: Predicting, history: History) -> None:
        self._foreground = foreground
        self._training = training
        self._predicting = predicting
        self._history = history

    def tune(
        self,
        budget: str | int | None,
        global_batch: int | None,
        seconds: float,
        knobs: Sequence[str] | None,
        same_mathematics: bool,
        progress: Progress,
        apply: Callable[[Settings], object],
    ) -> TuneResult:
        """The fastest settings that fit; ``apply`` changes to settings.

        Raises:
            InvalidInput: what was asked for cannot be used.
            WorkloadError: nothing is loaded, or not even the present settings could be looked at.
        """
        budget_bytes = None if budget is None else parse_size(budget)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not LEAST_S <= seconds <= MOST_S:
            raise InvalidInput(f"seconds={seconds!r} cannot be used: write a number from {LEAST_S:g} to {MOST_S:g}.")
        self._foreground.check_loaded()
        training, ranks = self._training, self._history.size
        workload, present = training.workload, training.settings
        assert workload is not None

        def ask(changes: Mapping[str, Any]) -> Settings:
            settings = compatibility.asked(present, changes, ranks)
            compatibility.check(settings, workload, ranks)
            return settings

        choice = space(present, workload, ranks, ask, knobs, global_batch, same_mathematics)
        trials = _Trials(self._predicting, self._history, choice, budget_bytes, seconds, progress)
        stopped = ""
        try:
            search(choice, present, trials)
        except KeyboardInterrupt:
            stopped = "It was interrupted: this is the best by then."
        except Changed as why:
            stopped = f"It ended early, because {why}"
        if trials.record.refused and not trials.record.candidates and not stopped:
            raise WorkloadError(next(iter(trials.record.refused.values())))
        limits = [one.predicted.limit_bytes for one in trials.record.candidates.values()]
        known = [limit for limit in (budget_bytes, *limits) if limit is not None]
        result = TuneResult(
            present,
            choice,
            tuple(trials.record.candidates.values()),
            min(known, default=None),
            ranks,
            time.monotonic() - trials.began_s,
            stopped,
            apply,
        )
        if result.best:
            foretold = replace(result.best.predicted, samples_per_s=result.best.samples_per_s, before=present)
            self._history.predicted(Asked(foretold, trials.model_version, present, self._history.begun))
        return result


class _Trials:
    """Asks the ranks what the search wants to know, and keeps it.

    Attributes:
        record: what came of it.
        began_s: when the time began, on the monotonic clock.
        model_version: of what is tuned; see ``History``.
    """

    def __init__(
        self,
        predicting: Predicting,
        history: History,
        choice: Space,
        budget_bytes: int | None,
        seconds: float,
        progress: Progress,
    ) -> None:
        self.record = Record()
        self.began_s = time.monotonic()
        self._predicting = predicting
        self._history = history
        self._of = self._model()
        self.model_version = history.model_version
        self._space = choice
        self._budget_bytes = budget_bytes
        self._seconds = seconds
        self._progress = progress
        self._least_s: dict[int, float] = {}  # of small steps, by what their sizes follow from

    def time_spent(self) -> float:
        """The share of the time that is gone."""
        return (time.monotonic() - self.began_s) / self._seconds

    def fits(self, settings: Settings) -> bool:
        """Whether these settings fit, by small steps; asked once, for all splits of the batch that follow from them."""
        known, refused = self.record.candidates, self.record.refused
        if settings not in known and settings not in refused:
            self._tell()
            splits = [one for one in self._space.other_splits(settings) if one not in known and _follows(one, settings)]
            sizes = [one.batch_size for one in splits]
            try:
                try:
                    found = self._predicting.by_small_steps(settings, sizes)
                except NotThisTime:
                    found = self._predicting.by_small_steps(settings, sizes)
            except WorkloadError as error:
                refused.update(dict.fromkeys(splits, str(error)))
                return False
            why_not = self._hopeless(max(sizes), found[0].seconds)
            for one, prediction in zip(splits, found, strict=True):
                known[one] = Candidate(one, prediction, within(prediction, self._budget_bytes), failed=why_not)
        return settings in known and known[settings].fits and not known[settings].failed

    def _hopeless(self, size: int, seconds: float) -> str:
        """Why nothing that small steps took so long for is worth whole ones: some devices have no fast fp16, say."""
        least = self._least_s[min(size, max(SMALL))] = min(seconds, self._least_s.get(min(size, max(SMALL)), math.inf))
        times = seconds / least
        slow = times > _HOPELESS and seconds > _HOPELESS_S
        return f"small steps took {times:.0f} times as long as others" if slow else ""

    def measure(self, settings: Settings) -> None:
        """Take whole steps under them."""
        self._tell()
        candidate = self.record.candidates[settings]
        try:
            found = self._predicting.by_whole_steps(settings)
        except NotThisTime:
            return
        except WorkloadError as error:
            candidate.failed = str(error)
            return
        candidate.predicted, candidate.fits = found, within(found, self._budget_bytes)
        if found.samples_per_s is not None:
            candidate.rates.append(found.samples_per_s)

    def _tell(self) -> None:
        """Say how far it is; ends tuning when what is tuned is another model by now."""
        if self._model() != self._of:
            raise Changed("something was loaded, or a cell ran on the ranks, and may have changed the model.")
        measured, best = self.record.measured, self.record.fastest
        said = f"{len(measured)} of {len(self._space.candidates)} settings measured"
        if best:
            changes = typed(self._space.start, best.settings) or "the present settings"
            said += f"; best so far {format_rate(speed_of(best))} samples/s, {changes}"
        self._progress(said, min(1.0, self.time_spent()))

    def _model(self) -> tuple[int, int]:
        return self._history.loaded_as, self._history.model_version


def _follows(one: Settings, settings: Settings) -> bool:
    """Whether what one needs follows from the same small steps as what the other needs."""
    either = (one, settings)
    small = [each.batch_size <= max(SMALL) for each in either]
    return one == settings or (not any(small) and len({shortened(each).accumulation_steps for each in either}) == 1)
