"""Measures settings for the tuner: by small steps what they need, by whole ones how fast they are, all undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...planning.fit import fits, within
from ...planning.instead import as_fit, instead_of, of_tuned
from ...planning.prediction import Prediction
from ...planning.score import Asked
from ...planning.tuning.record import Candidate, Record, TrialTimes, speed_of
from ...planning.tuning.result import TuneResult
from ...planning.tuning.search import search
from ...planning.tuning.space import SPLIT, Space, space
from ...report.answered import TUNER
from ...report.differences import typed
from ...report.instead import Fit, Instead
from ...shared.answers import Progress
from ...shared.errors import GpumemError, InvalidInput, NotThisTime, WorkloadError
from ...shared.forecast import SMALL
from ...shared.knobs.step import shortened
from ...shared.messages import least_limit
from ...shared.settings import Settings
from ...shared.units import format_bytes, format_rate, parse_size
from .. import compatibility
from ..cluster import AsksRanks, Cluster
from ..history import History
from .fitting import Changed, Knobs, SlowPrecisions, Unchanged, ended_early
from .instead import FindingInstead
from .predicting import Predicting

_LEAST_BUDGET = 2**20  # bytes: a number without a unit may be meant as MiB
LEAST_S, MOST_S = 1.0, 86400.0


class Tuning(AsksRanks):
    """Tunes what the ranks of one cluster train; training that goes on does so between the trials."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._predicting = cluster.predicting
        self._finding = FindingInstead(cluster)

    def tune(
        self,
        budget: str | int | None,
        global_batch: int | None,
        seconds: float,
        knobs: Iterable[str] | None,
        same_mathematics: bool,
        progress: Progress,
        applying: Callable[[Settings], Callable[[Knobs], object]],
    ) -> TuneResult:
        """Return the fastest settings that fit, as :meth:`Session.tune`; ``applying`` as in :class:`Fitting`.

        Raises:
            InvalidInput: what was asked for cannot be used.
            WorkloadError: no settings could be looked at.
        """
        budget_bytes = None if budget is None else parse_size(budget)
        if budget_bytes is not None and budget_bytes < _LEAST_BUDGET:
            raise InvalidInput(
                f"budget={budget!r} is {format_bytes(budget_bytes)}, less than any rank holds: write a size such as "
                "512MiB."
            )
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not LEAST_S <= seconds <= MOST_S:
            raise InvalidInput(f"seconds={seconds!r} cannot be used: write a number from {LEAST_S:g} to {MOST_S:g}.")
        self._foreground.check_loaded()
        training, ranks = self._training, self._history.size
        workload, present, step = training.workload, training.settings, self._history.steps
        apply = applying(present)
        assert workload is not None

        def ask(changes: Mapping[str, Any]) -> Settings:
            settings = compatibility.asked(present, changes, ranks)
            compatibility.check(settings, workload, ranks)
            return settings

        splits = self._predicting.splits()
        choice = space(present, workload, ranks, ask, knobs, global_batch, same_mathematics, splits)

        slow = SlowPrecisions(self._predicting, present, workload.data.batched, budget_bytes)
        unchanged = Unchanged(self._history, lambda: training.settings)
        trials = _Trials(self._predicting, self._history, unchanged, choice, slow, budget_bytes, seconds, progress)
        record, stopped = trials.record, ""
        try:
            search(choice, trials)
        except (KeyboardInterrupt, Changed, GpumemError) as why:
            if isinstance(why, GpumemError) and not record.measured:
                raise
            stopped = ended_early(why)
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
            given_s=seconds,
            longest_s=trials.times.longest_s,
            stopped=stopped,
            refused=dict(record.refused),
            splits=splits,
            _set=apply,
        )
        if best := result.best:
            foretold = replace(best.foretold, before=present)
            if budget_bytes is not None:  # which holds for this answer alone
                foretold = within(foretold, least_limit(self._history.readings))
            self._history.predicted(Asked(foretold, trials.model_version, present, self._history.begun))
        result = replace(result, instead=self._instead(result, budget_bytes, progress))
        if budget_bytes is None:
            self._tell(result, trials.model_version)
        self._record.answered(TUNER, result.why, step, workload.name)  # something else may be loaded by now
        return result

    def _instead(self, result: TuneResult, budget_bytes: int | None, progress: Progress) -> Instead | None:
        """Return what to train with in place of the present settings; ``None`` where these fit, or an interrupt came.

        Where nothing of the tuner's choice fits either, other knobs are asked about, as everywhere else.
        """
        start, best = result.space.start, result.best
        now = next((one.predicted for one in result.looked_at if one.settings == start), None)
        in_use = best is not None and best.settings == start  # tight, and nothing has more room
        if now is None or fits(now) or in_use or (result.stopped and best is None):
            return None
        if best is None:
            with suppress(KeyboardInterrupt, GpumemError):
                return self._finding.find(now, progress, budget_bytes)
            return None
        return of_tuned(instead_of(start, result.ranks, [], now, splits=result.splits), *_all_tried(result, best))

    def _tell(self, result: TuneResult, model_version: int) -> None:
        """Give the best as the answer to all settings of that global batch that are known not to fit."""
        best, knobs = result.best, {*result.space.knobs, *SPLIT}
        if best is None:
            return
        for known in (*self._history.answers.known, *filter(None, [result.instead])):
            of_batch = best.settings.samples_per_rank == known.failed.samples_per_rank
            if of_batch and best.settings != known.failed and best.settings.changed_from(known.failed).keys() <= knobs:
                self._history.found_instead(of_tuned(known, *_all_tried(result, best)), model_version)


def _all_tried(result: TuneResult, best: Candidate) -> tuple[Fit, list[Fit]]:
    """Return the best, and all others that were looked at."""
    return _tried(best), [_tried(one) for one in result.looked_at if one is not best]


def _tried(one: Candidate) -> Fit:
    """Return a candidate with what it measured."""
    return replace(as_fit(one.predicted), barely=one.tight, samples_per_s=one.samples_per_s)


class _Trials:
    """Asks the ranks what the search wants to know, and keeps it.

    Attributes:
        record: what came of it.
        times: what each of its trials took.
        began_s: when the time began, on the monotonic clock.
        model_version: of what is tuned; see ``History``.
    """

    def __init__(
        self,
        predicting: Predicting,
        history: History,
        unchanged: Unchanged,
        choice: Space,
        slow: SlowPrecisions,
        budget_bytes: int | None,
        seconds: float,
        progress: Progress,
    ) -> None:
        self.record = Record(choice.start)
        self.times = TrialTimes()
        self.began_s = time.monotonic()
        self.model_version = history.model_version
        self._unchanged = unchanged
        self._predicting = predicting
        self._space = choice
        self._budget_bytes = budget_bytes
        self._seconds = seconds
        self._progress = progress
        self._slow = slow

    def time_spent(self) -> float:
        """Return the share of the time that is gone."""
        return (time.monotonic() - self.began_s) / self._seconds

    def time_for(self, settings: Settings) -> bool:
        """Return whether they can be measured in the time left; before any measurement, whether time is left."""
        known = settings in self.record.candidates
        ahead_s = self.times.ahead_s(settings, known) if self.record.measured else 0.0
        return self._left_s > ahead_s

    def fits(self, settings: Settings) -> bool:
        """Return whether these settings fit by small steps; asked once for all splits of the batch."""
        known, refused = self.record.candidates, self.record.refused
        if settings not in known and settings not in refused:
            self._tell()
            splits = [one for one in self._space.other_splits(settings) if one not in known and _follows(one, settings)]
            try:
                found = self._looked_at(settings, splits)
            except WorkloadError as error:
                refused.update(dict.fromkeys(splits, str(error)))
                return False
            for one, prediction in zip(splits, found, strict=True):
                known[one] = Candidate(one, prediction)
        return settings in known and known[settings].fits and not known[settings].failed

    def measure(self, settings: Settings) -> None:
        """Take whole steps under them."""
        self._tell()
        candidate, began_s, step_s = self.record.candidates[settings], time.monotonic(), None
        try:
            found = self._predicting.by_whole_steps(settings, self._budget_bytes)
            step_s = found.step_s
        except NotThisTime:
            return
        except WorkloadError as error:
            candidate.failed = str(error)
            return
        finally:
            self.times.turn(settings, time.monotonic() - began_s, step_s)
            self._unchanged.check()
        candidate.took_steps(found)

    @property
    def _left_s(self) -> float:
        return self.began_s + self._seconds - time.monotonic()

    def _looked_at(self, settings: Settings, splits: list[Settings]) -> list[Prediction]:
        with suppress(NotThisTime):
            return self._look(settings, splits)
        return self._look(settings, splits)  # what was in the way may be gone

    def _look(self, settings: Settings, splits: list[Settings]) -> list[Prediction]:
        if "precision" in self._space.knobs and (why := self._slow.why(settings, self._again)):
            raise WorkloadError(why)
        return self._small_steps(settings, splits)

    def _again(self, took_s: float) -> bool:
        self.times.first_step(took_s)
        return self._left_s > took_s

    def _small_steps(self, settings: Settings, splits: list[Settings]) -> list[Prediction]:
        sizes, began_s = [one.batch_size for one in splits], time.monotonic()
        found = self._predicting.by_small_steps(settings, sizes, self._budget_bytes)
        self.times.small_steps(time.monotonic() - began_s)
        self._unchanged.check()
        return [replace(said, settings=one) for one, said in zip(splits, found, strict=True)]

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
    """Return whether what one needs follows from the same small steps as what the other needs."""
    either = (one, settings)
    small = [each.batch_size <= max(SMALL) for each in either]
    return one == settings or (not any(small) and len({shortened(each).accumulation_steps for each in either}) == 1)
