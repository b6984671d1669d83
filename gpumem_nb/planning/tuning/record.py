"""What became of the settings that a tuner looked at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...shared.settings import Settings
from ..prediction import DOES_NOT_FIT, Prediction

_MEDIAN_ERROR = 1.253  # standard errors of a mean are those of a median of normal values
_LEAST_ERROR = 0.05  # of samples/s that were measured once or twice, of which no spread can be told


@dataclass(slots=True)
class Candidate:
    """One setting.

    Attributes:
        settings: what it is about.
        predicted: what it needs; that of a whole step once one was taken.
        fits: whether that stays within the budget, its error included.
        rates: samples/s of all ranks, in each turn that it had.
        failed: why no step was possible, in words; empty while one was.
    """

    settings: Settings
    predicted: Prediction
    fits: bool
    rates: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def untried(self) -> bool:
        """Whether no step was taken under it."""
        return not self.rates and not self.failed

    @property
    def samples_per_s(self) -> float | None:
        """The median of its turns; ``None`` without any."""
        return statistics.median(self.rates) if self.rates and not self.failed else None

    @property
    def error(self) -> float:
        """The standard error of that, in samples/s."""
        if not self.rates:
            return math.nan
        if len(self.rates) < 3:
            return _LEAST_ERROR * statistics.median(self.rates)
        return _MEDIAN_ERROR * statistics.stdev(self.rates) / math.sqrt(len(self.rates))


class Record:
    """Everything that was looked at, in that order.

    Attributes:
        candidates: whose memory is known.
        refused: under which no step was possible, and why.
    """

    def __init__(self) -> None:
        self.candidates: dict[Settings, Candidate] = {}
        self.refused: dict[Settings, str] = {}

    @property
    def measured(self) -> list[Candidate]:
        """What fits and was measured."""
        return [one for one in self.candidates.values() if one.fits and one.samples_per_s is not None]

    @property
    def fastest(self) -> Candidate | None:
        """Of those with as many turns as any; ``None`` while nothing was measured."""
        measured = self.measured
        most = max((len(one.rates) for one in measured), default=0)
        # While rounds go on, whoever had no turn in this one yet is not out of it.
        return max((one for one in measured if len(one.rates) >= most - 1), key=speed_of, default=None)


def speed_of(candidate: Candidate) -> float:
    """Samples/s; none where nothing was measured."""
    return candidate.samples_per_s or 0.0


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of which no other one is faster with as little reserved memory, from the least memory to the most."""
    front: list[Candidate] = []
    for one in sorted(
        candidates, key=lambda candidate: (candidate.predicted.reserved_peak_bytes, -speed_of(candidate))
    ):
        if not front or speed_of(one) > speed_of(front[-1]):
            front.append(one)
    return front


def within(predicted: Prediction, budget_bytes: int | None) -> bool:
    """Whether settings fit the ranks and the budget, the error of the prediction included."""
    if predicted.verdict == DOES_NOT_FIT:
        return False
    limits = [limit for limit in (predicted.limit_bytes, budget_bytes) if limit is not None]
    return not limits or predicted.high_bytes <= min(limits)
