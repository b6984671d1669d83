"""The data of all charts at one moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...report.rescue import Rescue
from ...report.run_summary import Evaluation
from ...report.step_time import TimeReport
from ...shared.messages import RankInfo, Reading, Sample
from ...shared.settings import Settings
from ..series import Array, Bands, Mark, Peak, Series, bands, marks, peaks, series, smoothed, worst_first

if TYPE_CHECKING:
    from ...session import Session

_LIMIT_IN_SIGHT = 3  # what is more than so many times the highest bar would flatten it, and is told in words
_HEADROOM = 1.35  # room above for what marks say
_HEADROOM_OF_WORDS = 1.8  # and for limits that are told in words
LAST_STEPS = 100
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Choice:
    """The user's choice of what to see: the ``LAST_STEPS`` alone, smoothed lines, the loss on a logarithmic axis."""

    latest: bool = False
    smooth: bool = False
    log_loss: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """The least that a discarded step needed: all bytes in use and those that it asked for."""

    step: int
    bytes: int

    @classmethod
    def of(cls, rescue: Rescue | None, readings: Sequence[Reading | None]) -> Attempt | None:
        """Return that of a step that ran out of memory, if the device said what was asked for and free."""
        if rescue is None or rescue.failure.asked_bytes is None or rescue.failure.free_bytes is None:
            return None
        reading = readings[rescue.failure.rank]
        if reading is None or reading.limit_bytes is None:
            return None
        return cls(rescue.step, reading.limit_bytes - rescue.failure.free_bytes + rescue.failure.asked_bytes)


@dataclass(frozen=True)
class View:
    """All that is drawn in one update, made once for all charts.

    Attributes:
        ranks: who they are, in rank order.
        readings: the latest of each rank's device, ``None`` where there is none.
        peaks: the latest known peak of each rank that has reported.
        worst: the highest of these as a share of its limit, ``None`` before there is any.
        bands: what the peaks of the worst rank's steps are made of.
        series: the finished steps of all ranks, thinned out.
        marks: where something happened.
        evaluations: on the validation data, oldest first.
        choice: what of it is shown, and how.
        attempt: the peak that was too high, while the panel says so.
        time: where the time of a step goes, once one was done.
    """

    ranks: Sequence[RankInfo]
    readings: Sequence[Reading | None]
    peaks: Sequence[Peak]
    worst: Peak | None
    bands: Bands
    series: Series
    marks: Sequence[Mark]
    evaluations: Sequence[Evaluation]
    choice: Choice
    attempt: Attempt | None = None
    time: TimeReport | None = None

    @classmethod
    def of(
        cls,
        ranks: Sequence[RankInfo],
        readings: Sequence[Reading | None],
        samples: Sequence[Sequence[Sample]],
        settings: Callable[[int], Settings | None],
        evaluations: Sequence[Evaluation] = (),
        choice: Choice | None = None,
        attempt: Attempt | None = None,
        changed_after: int = 0,
    ) -> View:
        """Return the view of these ranks' readings and samples; ``settings`` are those of a settings id, where known.

        Steps up to ``changed_after`` say nothing about where time goes now.
        """
        found = peaks(samples, readings, changed_after)
        worst = next(iter(worst_first(found)), None)
        time = TimeReport.of(samples, changed_after)
        told, choice = marks(samples, settings), choice or Choice()
        if choice.latest:
            newest = max((of_rank[-1].step for of_rank in samples if of_rank), default=0)
            samples = [[sample for sample in of_rank if sample.step > newest - LAST_STEPS] for of_rank in samples]
            told = [mark for mark in told if mark.step > newest - LAST_STEPS]
            evaluations = [one for one in evaluations if one.step > newest - LAST_STEPS]
        of_worst = bands(samples[worst.rank] if worst else [])
        drawn = series(samples)
        return cls(ranks, readings, found, worst, of_worst, drawn, told, evaluations, choice, attempt, time)

    @classmethod
    def of_session(
        cls,
        session: Session,
        ranks: Sequence[RankInfo],
        choice: Choice | None = None,
        attempt: Attempt | None = None,
    ) -> View:
        """Return the view of what is loaded now, on these ranks of a session."""
        history = session.history
        settings = {tried.settings_id: tried.settings for tried in list(history.tried)}
        evaluations = [one for one in list(history.evaluations) if one.settings_id >= history.loaded_as]
        what = (ranks, history.readings, history.of_loaded(), settings.get, evaluations, choice, attempt)
        return cls.of(*what, history.changed_after)

    @classmethod
    def before(cls, ranks: Sequence[RankInfo]) -> View:
        """Return the view of ranks that have not reported anything yet."""
        return cls.of(ranks, [None] * len(ranks), [[] for _ in ranks], lambda _: None)

    @property
    def has_steps(self) -> bool:
        """Return whether any step was finished."""
        return bool(self.series.step.size)

    def shown(self, line: Array) -> Array:
        """Return the values of a line as they are drawn."""
        return smoothed(line) if self.choice.smooth else line

    @property
    def virtual(self) -> bool:
        """Return whether the memory of any of the ranks is a virtual GPU's."""
        return any(rank.virtual for rank in self.ranks)

    @cached_property
    def highest_peaks(self) -> Array:
        """The highest live bytes of each step, of the rank that has most."""
        return np.asarray(self._peaks.max(axis=0), dtype=np.float64)

    @cached_property
    def lowest_peaks(self) -> Array:
        """The highest live bytes of each step, of the rank that has least."""
        return np.asarray(self._peaks.min(axis=0), dtype=np.float64)

    @cached_property
    def top(self) -> int:
        """The most bytes that any chart of memory shows, limits aside; at least 1."""
        present = [reading for reading in self.readings if reading]
        now = [reading.live_peak_bytes for reading in present]
        return max([1, int(self.highest_peaks.max(initial=0)), *now, *(peak.reserved for peak in self.peaks)])

    @property
    def unit_bytes(self) -> int:
        """The bytes of the unit in which memory is drawn."""
        return _GIB if self.top >= 2 * _GIB else _MIB

    @property
    def unit(self) -> str:
        """That unit's name."""
        return "GiB" if self.unit_bytes == _GIB else "MiB"

    @property
    def limits(self) -> list[int]:
        """The ranks' different limits in bytes that are drawn, in ascending order."""
        return [limit for limit in self._all_limits if limit <= self.top * _LIMIT_IN_SIGHT]

    @property
    def limits_out_of_sight(self) -> list[int]:
        """Those far above everything drawn."""
        return [limit for limit in self._all_limits if limit > self.top * _LIMIT_IN_SIGHT]

    @property
    def memory_range(self) -> list[float]:
        """Return where the y axis of memory begins and ends, in ``unit``."""
        attempts = [attempt.bytes for attempt in self.attempts]
        room = _HEADROOM_OF_WORDS if self.limits_out_of_sight else _HEADROOM
        return [0, room * max([self.top, *attempts, *self.limits]) / self.unit_bytes]

    @property
    def attempts(self) -> list[Attempt]:
        """The attempt, if it is in sight: among the steps that are drawn, and not far above everything else."""
        one = self.attempt
        seen = one and self.has_steps and one.step >= self.series.step[0] and one.bytes <= self.top * _LIMIT_IN_SIGHT
        return [one] if one and seen else []

    @cached_property
    def _peaks(self) -> Array:
        return self.series.highest(lambda sample: sample.live_peak_bytes)

    @property
    def _all_limits(self) -> list[int]:
        return sorted({reading.limit_bytes for reading in self.readings if reading and reading.limit_bytes})
