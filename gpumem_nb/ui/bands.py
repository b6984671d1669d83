"""The categories of the ranks' peaks, as charts draw them: now for each rank, over steps for the worst one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..shared.categories import CATEGORIES
from ..shared.messages import Ledger, Reading, Sample
from .series import Array

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
    """Return the ranks that get a bar each, by the label under it."""
    if len(found) <= MOST_RANKS:
        return {str(peak.rank): peak for peak in found}
    ordered = worst_first(found)
    chosen = {"worst": ordered[0], "median": ordered[len(ordered) // 2], "best": ordered[-1]}
    return {f"{word}: {peak.rank}": peak for word, peak in chosen.items()}


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
