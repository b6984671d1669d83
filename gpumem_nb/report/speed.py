"""Throughput of one configuration, and whether that of another one differs from it.

One definition for all that is shown: samples/s of all ranks together, as the median of the steps judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..shared.messages import Sample
from ..shared.units import format_rate

WARM_UP_STEPS = 2  # under new settings: buffers, caches and kernels are made in them
STEPS_JUDGED = 50  # the latest ones
FEWEST_STEPS = 5  # of each side, before two are compared
WORTH_A_WORD = 0.1  # of a step, that all others wait for one rank
STARVED_SHARE = 0.15  # of a step, that ranks wait for a core: from here on the machine decides how long steps take
_MOST_STARVED = 0.9  # of a step: what is left of it then says nothing
# The standard error of a median of n normal values is 1.253 σ/√n, and σ is the interquartile range ÷ 1.349.
_NOTICEABLE_S = 0.1  # by which a first step takes longer
_MEDIAN_ERROR = 1.253 / 1.349


@dataclass(frozen=True, slots=True)
class Speed:
    """Samples/s over some steps: the median, half of all values lie between ``low`` and ``high``.

    ``starved`` is the share of a step's time that waiting for a core took from that median.
    """

    median: float
    low: float
    high: float
    steps: int
    starved: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float], with_cores: Sequence[float] = ()) -> Speed | None:
        """Summarise samples/s of single steps, and what each would be :func:`with_a_core`; ``None`` without any."""
        both = statistics.median(values) / statistics.median(with_cores) if values and with_cores else 1.0
        starved = max(0.0, 1 - both)
        if len(values) < 2:
            return cls(values[0], values[0], values[0], 1, starved) if values else None
        low, median, high = statistics.quantiles(values, method="inclusive")
        return cls(median, low, high, len(values), starved)

    @property
    def error(self) -> float:
        """Standard error of the median."""
        return _MEDIAN_ERROR * (self.high - self.low) / math.sqrt(self.steps)

    @property
    def with_cores(self) -> Speed:
        """Return the highest speed possible if no rank had waited for a core."""
        median, low, high = (with_a_core(one, self.starved) for one in (self.median, self.low, self.high))
        return Speed(median, low, high, self.steps)


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank for which the others wait, and the share of a step that they wait longer than it does."""

    rank: int
    share: float

    def __str__(self) -> str:
        return f"rank {self.rank} is slowest, others wait {100 * self.share:.0f} %"

    @classmethod
    def of(cls, samples: Sequence[Sequence[Sample]]) -> Straggler | None:
        """Under the latest settings, from a row of samples for each rank; ``None`` while no rank stands out."""
        waits = [
            [
                one.reduction_s / one.step_s
                for one in of_rank[-STEPS_JUDGED:]
                if one.done and one.reduction_s and one.settings_id == of_rank[-1].settings_id
            ]
            for of_rank in samples
        ]
        if len(waits) < 2 or min(map(len, waits)) < FEWEST_STEPS:
            return None
        least, *others = sorted((statistics.median(of_rank), rank) for rank, of_rank in enumerate(waits))
        share = statistics.median(wait for wait, _ in others) - least[0]
        return cls(least[1], share) if share >= WORTH_A_WORD else None


def judged(samples: Sequence[Sample], since_step: int) -> list[Sample]:
    """Return the latest steps of one configuration with known times.

    Without warm-up steps if there are others, or at least without the first of all.
    """
    found: list[Sample] = []
    for sample in reversed(samples):
        if sample.step <= since_step or (found and sample.settings_id != found[-1].settings_id):
            break
        if sample.done and sample.times:
            found.append(sample)
        if len(found) == STEPS_JUDGED + WARM_UP_STEPS:
            break
    found.reverse()
    return found[WARM_UP_STEPS:] or [sample for sample in found if not sample.prepares] or found


def of_first_step(samples: Iterable[Sample]) -> str:
    """Return a sentence on a first step that took noticeably longer, or that is the only one; else empty."""
    done = [sample for sample in samples if sample.done]
    firsts = [sample for sample in done if sample.first]
    others = [sample for sample in done if not sample.prepares]
    compiling = max(done, key=lambda sample: sample.compile_s, default=None)
    if compiling and compiling.compile_s:
        return (
            f"Step {compiling.step} took {compiling.step_s:.1f} s, of which compile=blocks compiled for "
            f"{compiling.compile_s:.1f} s. It counts in no samples/s."
        )
    if not firsts:
        return ""
    took_s, why = max(sample.step_s for sample in firsts), "kernels are loaded and memory is allocated in it"
    if not others:
        return f"The first step took {took_s:.1f} s: {why}, so no samples/s follow from it."
    others_s = [sample.step_s for sample in others if sample.settings_id == firsts[0].settings_id]
    if not others_s:
        return ""
    more_s = took_s - statistics.median(others_s)
    if more_s < max(_NOTICEABLE_S, statistics.median(others_s)):
        return ""
    return f"The first step took {took_s:.1f} s, {more_s:.1f} s more than later ones: {why}. It counts in no samples/s."


def compared(before: Speed | None, after: Speed | None) -> str:
    """Both in words, and by how much they differ if that can be told from how much single steps differ."""
    first, second = (format_rate(speed.median if speed else None) for speed in (before, after))
    both = f"{first} → {second} samples/s"
    if before is None or after is None:
        return both
    if before.steps < FEWEST_STEPS:
        return f"{both} (too few steps before to compare: {before.steps} of {FEWEST_STEPS})"
    if after.steps < FEWEST_STEPS:
        return f"{both} (too early to tell: {after.steps} of {FEWEST_STEPS} steps)"
    if why := not_comparable(before, after):
        return f"{both} ({_at_least(before, after) or why})"
    doubt = _doubt(before, after)
    about = f"±{100 * doubt / before.median:.0f} %, {before.steps} and {after.steps} steps"
    if abs(after.median - before.median) <= doubt:
        return f"{both}: no clear difference ({about})"
    return f"{both} ({percent(before.median, after.median)}, {about})"


def not_comparable(before: Speed | None, after: Speed | None) -> str:
    """Return why these speeds cannot be compared between settings; empty if they can."""
    starved = max((speed.starved for speed in (before, after) if speed), default=0.0)
    if starved < STARVED_SHARE:
        return ""
    return f"not comparable: machine busy, ranks waited for a core in {100 * starved:.0f} % of a step"


def _at_least(before: Speed, after: Speed) -> str:
    """Return the difference that is left if the slower side had waited for no core; empty if none is left for sure."""
    slower = before.median < after.median
    first, second = (before.with_cores, after) if slower else (before, after.with_cores)
    gained = second.median - first.median
    if (gained if slower else -gained) <= _doubt(first, second):
        return ""
    share = max(before.starved, after.starved)
    waited = f"ranks waited for a core in {100 * share:.0f} % of a step"
    return f"at least {percent(first.median, second.median)}, though {waited}"


def _doubt(before: Speed, after: Speed) -> float:
    """Return the difference between two medians that may be chance."""
    return 2 * math.hypot(before.error, after.error)


def with_a_core(samples_per_s: float, starved: float) -> float:
    """Return what a speed would come to at most if no rank had waited for a core, as they did for a share of a step."""
    return samples_per_s / (1 - min(starved, _MOST_STARVED))


def percent(before: float, after: float) -> str:
    """Return the difference as a share of what was before, with its sign."""
    return f"{(after / before - 1) * 100:+.0f} %".replace("-", "−")
