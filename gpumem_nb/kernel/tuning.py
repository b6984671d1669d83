"""Measures settings for the tuner: by small steps what they need, by whole ones how fast they are, all undone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..planning.prediction import Prediction
from ..planning.score import Asked
from ..planning.tuning.record import Candidate, Record, fits, speed_of
from ..planning.tuning.result import TuneResult
from ..planning.tuning.search import search
from ..planning.tuning.space import Space, space
from ..report.differences import typed
from ..shared.errors import GpumemError, InvalidInput, NotThisTime, WorkloadError
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
from .unchanged import Changed, Unchanged

LEAST_S, MOST_S = 1.0, 86400.0
_HOPELESS, _HOPELESS_S = 4, 1.0  # times as long as other small steps for a sample, and so long in all at least


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
        knobs: Iterable[str] | None,
        same_mathematics: bool,
        progress: Progress,
        apply: Callable[[dict[str, Any]], object],
    ) -> TuneResult:
        """The fastest settings that fit; ``apply`` changes knobs.

        Raises:
            InvalidInput: what was asked for cannot be used.
            WorkloadError: nothing is loaded, or no settings could be looked at.
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
        record, stopped = trials.record, ""
        try:
            search(choice, present, trials)
        except KeyboardInterrupt as interrupt:
            stopped = f"It was interrupted. {interrupt}".rstrip()
        except Changed as why:
            stopped = f"It ended early, because {why}"
        except GpumemError as error:
            if not record.measured:
                raise
            stopped = f"It ended early: {error}"
        if record.refused and not record.candidates and not stopped:
            raise WorkloadError(next(iter(record.refused.values())))
        limits = [budget_bytes, *(one.predicted.limit_bytes for one in record.candidates.values())]
        result = TuneResult(
            present=present,
            space=choice,
            looked_at=tuple(record.candidates.values()),
            budget_bytes=min((limit for limit in limits if limit is not None), default=None),
            ranks=ranks,
            seconds=time.monotonic() - trials.began_s,
            stopped=stopped,
            refused=dict(record.refused),
            _set=apply,
        )
        if best := result.best:
            foretold = _foretold(best, present, ranks)
            self._history.predicted(Asked(foretold, trials.model_version, present, self._history.begun))
        return result


def _foretold(best: Candidate, present: Settings, ranks: int) -> Prediction:
    """What is to be held against what comes of the best settings."""
    rate = speed_of(best)
    return replace(
        best.predicted,
        before=present,
        step_s=best.settings.samples_per_rank * ranks / rate,
        samples_per_s=rate,
        low_samples_per_s=min(best.rates),
        high_samples_per_s=max(best.rates),
    )


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
        self.model_version = history.model_version
        self._unchanged = Unchanged(history)
        self._predicting = predicting
        self._missed = predicting.score().missed(history.model_version)
        self._space = choice
        self._budget_bytes = budget_bytes
        self._seconds = seconds
        self._progress = progress
        self._least_s: dict[int, float] = {}  # of small steps for a sample, by what their sizes follow from

    def time_spent(self) -> float:
        """The share of the time that is gone."""
        return (time.monotonic() - self.began_s) / self._seconds

    def fits(self, settings: Settings) -> bool:
        """Whether these settings fit, by small steps; asked once, for all splits of the batch that follow from them."""
        known, refused = self.record.candidates, self.record.refused
        if settings not in known and settings not in refused:
            self._tell()
            splits = [one for one in self._space.other_splits(settings) if one not in known and _follows(one, settings)]
            try:
                found = self._small_steps(settings, splits)
                if slow := self._hopeless(settings, found[0].seconds):
                    found = self._small_steps(settings, splits)  # something may have come in between
                    slow = self._hopeless(settings, found[0].seconds)
            except NotThisTime:
                found, slow = self._small_steps(settings, splits), ""
            except WorkloadError as error:
                refused.update(dict.fromkeys(splits, str(error)))
                return False
            for one, prediction in zip(splits, found, strict=True):
                known[one] = Candidate(one, prediction, fits(prediction), failed=slow)
        return settings in known and known[settings].fits and not known[settings].failed

    def measure(self, settings: Settings) -> None:
        """Take whole steps under them."""
        self._tell()
        candidate = self.record.candidates[settings]
        try:
            found = self._predicting.by_whole_steps(settings, self._budget_bytes)
        except NotThisTime:
            return
        except WorkloadError as error:
            candidate.failed = str(error)
            return
        finally:
            self._unchanged.check()
        candidate.took_steps(found)

    def _small_steps(self, settings: Settings, splits: list[Settings]) -> list[Prediction]:
        sizes = [one.batch_size for one in splits]
        found = self._predicting.by_small_steps(settings, sizes, self._budget_bytes)
        self._unchanged.check()
        return [replace(said.widened(*self._missed), settings=one) for one, said in zip(splits, found, strict=True)]

    def _hopeless(self, settings: Settings, seconds: float) -> str:
        """Why nothing that small steps took so long for is worth whole ones: some devices have no fast fp16, say."""
        size = settings.batch_size if settings.batch_size <= max(SMALL) else 0  # those all follow from the same two
        each_s = seconds / shortened(settings).accumulation_steps
        least_s = self._least_s[size] = min(each_s, self._least_s.get(size, math.inf))
        slow = each_s > _HOPELESS * least_s and seconds > _HOPELESS_S and bool(self.record.measured)
        return f"small steps took {each_s / least_s:.0f} times as long as others" if slow else ""

    def _tell(self) -> None:
        """Say how far it is; ends tuning when what is tuned may be another model by now."""
        self._unchanged.check()
        measured, best = self.record.measured, self.record.fastest
        said = f"{len(measured)} of {len(self._space.candidates)} settings measured"
        if best:
            changes = typed(self._space.start, best.settings) or typed(Settings(), best.settings) or "as it is"
            said += f"; best so far {format_rate(speed_of(best))} samples/s, {changes}"
        self._progress(said, min(1.0, self.time_spent()))


def _follows(one: Settings, settings: Settings) -> bool:
    """Whether what one needs follows from the same small steps as what the other needs."""
    either = (one, settings)
    small = [each.batch_size <= max(SMALL) for each in either]
    return one == settings or (not any(small) and len({shortened(each).accumulation_steps for each in either}) == 1)
