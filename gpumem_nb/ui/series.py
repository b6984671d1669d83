"""From samples to what the charts draw: few points, the categories of peaks, marks where something happened."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..report import differences
from ..shared.categories import CATEGORIES
from ..shared.messages import Ledger, Reading, Sample
from ..shared.settings import Settings

Array = NDArray[np.float64]
Value = Callable[[Sample], float | None]
MOST_POINTS = 300
MOST_MARKS = 8
SMOOTHING = 0.9  # of one point upon the next


@dataclass(frozen=True, slots=True)
class Series:
    """The finished steps that all ranks have in common, in buckets of equal size; values of them with few points.

    Attributes:
        step: the last step of each bucket.
    """

    step: Array
    _by_rank: Sequence[Sequence[Sample]]
    _starts: NDArray[np.intp]

    def highest(self, value: Value) -> Array:
        """Return the highest value within each bucket, a row for each rank."""
        return np.maximum.reduceat(self._table(value), self._starts, axis=-1)

    def mean_of_ranks(self, value: Value) -> Array:
        """Return the mean of all ranks within each bucket, in one row."""
        return self._mean(self._table(value).mean(axis=0))

    def sum_of_ranks(self, value: Value) -> Array:
        """Return what all ranks have together, as the mean within each bucket, in one row."""
        return self._mean(self._table(value).sum(axis=0))

    def means_of_ranks(self, values: Callable[[Sample], Sequence[float]]) -> Array:
        """Return the mean of all ranks within each bucket of several values of a step, a row for each of them."""
        if not self.step.size:
            return np.empty((0, 0))
        table = np.array([[values(sample) for sample in samples] for samples in self._by_rank], dtype=np.float64)
        return np.array([self._mean(row) for row in table.mean(axis=0).T])

    def _table(self, value: Value) -> Array:
        """Return a row for each rank; what is not known is not a number."""
        return np.array([[value(sample) for sample in samples] for samples in self._by_rank], dtype=np.float64)

    def _mean(self, values: Array) -> Array:
        counts = np.diff(self._starts, append=values.shape[-1])
        return np.add.reduceat(values, self._starts, axis=-1) / counts


def series(by_rank: Sequence[Sequence[Sample]]) -> Series:
    """Finished steps, thinned out to a bounded number of buckets."""
    good = [[sample for sample in samples if sample.done] for samples in by_rank]
    length = min(map(len, good), default=0)
    if not length:
        return Series(np.empty(0), [[] for _ in good], np.empty(0, dtype=np.intp))
    rows = [samples[-length:] for samples in good]
    step = np.array([sample.step for sample in rows[0]], dtype=np.float64)
    width = -(-(int(step[-1] - step[0]) + 1) // MOST_POINTS)
    starts = np.flatnonzero(np.diff(step // width, prepend=-1))
    return Series(step[np.append(starts[1:], length) - 1], rows, starts)


def smoothed(values: Array, weight: float = SMOOTHING) -> Array:
    """Return the exponential moving average of a row, without its bias towards the first value; gaps stay gaps."""
    result, mean, seen = np.full_like(values, np.nan), 0.0, 0.0
    for place, value in enumerate(values):
        if np.isfinite(value):
            mean, seen = weight * mean + (1 - weight) * value, weight * seen + (1 - weight)
            result[place] = mean / seen
    return result


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at a step; ``bad`` for what ended a step."""

    step: int
    text: str
    bad: bool


def marks(by_rank: Sequence[Sequence[Sample]], settings: Callable[[int], Settings | None]) -> list[Mark]:
    """Return the latest flips and failures, found in the samples: a flip is marked at its first step."""
    found: dict[int, Mark] = {}
    before: Settings | None = None
    for at_once in zip(*by_rank, strict=False):
        first = at_once[0]
        now = settings(first.settings_id)
        flipped = before is not None and now is not None and now is not before
        text = differences.short(before, now) if flipped and before and now else ""
        kinds = {sample.event for sample in at_once if not sample.done}
        if kinds:
            text = " ".join(filter(None, ("OOM" if "oom" in kinds else "failed", text)))
        if text:
            # A step that was discarded keeps the number of the one before it.
            step = first.step + bool(kinds)
            earlier = found.pop(step, None)
            joined = f"{earlier.text} → {text}" if earlier else text
            found[step] = Mark(step, joined, bool(kinds) or bool(earlier and earlier.bad))
        before = now or before
    return list(found.values())[-MOST_MARKS:]


MOST_RANKS = 8  # of more, three get a bar each
STANDS_OUT = 0.05  # more than the median rank
MOST_LEDGERS = 240  # points of each band; by default one step in twenty is recorded


@dataclass(frozen=True, slots=True)
class Peak:
    """The latest known peak of a rank in bytes.

    ``ledger`` says what it is made of, once a step was recorded under the current settings; ``reserved`` is what the
    allocator held at most in that step.
    """

    rank: int
    bytes: int
    limit: int | None
    ledger: Ledger | None
    reserved: int = 0

    @property
    def share(self) -> float:
        """The peak as a share of the limit; where that is not known, in bytes, which only compares ranks."""
        return self.bytes / (self.limit or 1)


def peaks(
    by_rank: Sequence[Sequence[Sample]], readings: Sequence[Reading | None], changed_after: int = 0
) -> list[Peak]:
    """Return the latest known peak of each rank that has reported, in rank order.

    What a step up to ``changed_after`` was made of says nothing of later ones.
    """
    found = []
    for rank, (samples, reading) in enumerate(zip(by_rank, readings, strict=True)):
        limit = reading.limit_bytes if reading else None
        newest = next((sample for sample in reversed(samples) if sample.done and not sample.tried), None)
        if newest is None:
            if reading:
                found.append(Peak(rank, reading.live_peak_bytes, limit, None, reading.reserved_peak_bytes))
            continue
        recorded = next((s for s in reversed(samples) if s.ledger and s.done), newest)
        outdated = recorded.step <= changed_after < newest.step
        ledger = recorded.ledger if recorded.settings_id == newest.settings_id and not outdated else None
        of_step = recorded if ledger else newest
        live = ledger.peak_bytes if ledger else newest.live_peak_bytes
        found.append(Peak(rank, live, limit, ledger, max(live, of_step.reserved_peak_bytes)))
    return found


def worst_first(found: Sequence[Peak]) -> list[Peak]:
    """Sorted by share of the limit, in whole percent, so that similar ranks do not keep changing places."""
    top = max((peak.share for peak in found), default=0) or 1
    return sorted(found, key=lambda peak: (-round(100 * peak.share / top), peak.rank))


def above_median(peak: Peak, found: Sequence[Peak]) -> float:
    """Return how much larger than the median rank's it is, as a fraction of that; 0 where it does not stand out."""
    more = peak.bytes / max(1, statistics.median(other.bytes for other in found)) - 1
    return more if more >= STANDS_OUT else 0.0


def shown(found: Sequence[Peak]) -> dict[str, Peak]:
    """Return the ranks that get a bar each, by the label under it; of many the worst, the median and the best one."""
    if len(found) > MOST_RANKS:
        ordered = worst_first(found)
        found = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    return {str(peak.rank): peak for peak in found}


@dataclass(frozen=True, slots=True)
class Bands:
    """Bytes of each category at the peak, a row each in stacking order, at the steps that were recorded.

    The last column repeats the one before it at the latest step.
    """

    step: Array
    live: Array


def bands(samples: Sequence[Sample]) -> Bands:
    """Return the bands of one rank, thinned out to the latest record in each stretch of steps."""
    good = [sample for sample in samples if sample.done]
    recorded = [(sample.step, sample.ledger) for sample in good if sample.ledger]
    if not recorded:
        return Bands(np.empty(0), np.empty((len(CATEGORIES), 0)))
    width = -(-(recorded[-1][0] - recorded[0][0] + 1) // MOST_LEDGERS)
    kept = list({step // width: (step, ledger) for step, ledger in recorded}.values())
    kept.append((good[-1].step, kept[-1][1]))
    live = [[ledger.at_peak.get(name, 0) for _, ledger in kept] for name in CATEGORIES]
    return Bands(np.array([step for step, _ in kept], dtype=np.float64), np.array(live, dtype=np.float64))
