"""The results of the settings that a tuner looked at, and how long others will take to be looked at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...shared.settings import Settings
from ..fit import with_longest, worth_a_step
from ..prediction import DOES_NOT_FIT, TIGHT, Prediction

TURNS_WITH_AN_ERROR = 3  # from which on a spread can be told
_MEDIAN_ERROR = 1.253  # standard errors of a mean are those of a median of normal values, of many
_UNKNOWN, _LEAST = 0.05, 0.01  # shares of samples/s that a decision leaves to chance, with fewer turns and with more


@dataclass(slots=True)
class Candidate:
    """One setting.

    Attributes:
        settings: what it is about.
        predicted: what it needs; once whole steps were taken, that of those that needed most.
        fits: whether that is expected to stay within the limit and the budget, see ``planning/fit.py``.
        rates: samples/s of all ranks, in each turn that it had.
        failed: why no step was possible or none was tried, in words; empty otherwise.
    """

    settings: Settings
    predicted: Prediction
    rates: list[float] = field(default_factory=list)
    failed: str = ""
    fits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.fits = worth_a_step(self.predicted)

    def took_steps(self, predicted: Prediction) -> None:
        """Take in what whole steps needed, and how fast they were. What once did not fit never does.

        Steps of the largest sample were small ones, which this keeps to.
        """
        first, predicted = not self.rates, with_longest(predicted, self.predicted)
        if first or predicted.verdict == DOES_NOT_FIT or predicted.high_bytes > self.predicted.high_bytes:
            self.predicted = predicted
        self.fits = self.fits and worth_a_step(predicted)
        if predicted.samples_per_s is not None:
            self.rates.append(predicted.samples_per_s)

    @property
    def untried(self) -> bool:
        """Return whether no step was taken under it."""
        return not self.rates and not self.failed

    @property
    def usable(self) -> bool:
        """Return whether it was measured, and nothing speaks against it."""
        return bool(self.rates) and self.fits and not self.failed

    @property
    def tight(self) -> bool:
        """Return whether the limit lies within the error of what it needs."""
        return self.fits and self.predicted.verdict == TIGHT

    @property
    def samples_per_s(self) -> float | None:
        """The median of its turns; ``None`` without any."""
        return statistics.median(self.rates) if self.rates and not self.failed else None

    @property
    def foretold(self) -> Prediction:
        """Return its prediction, with the throughput of all its turns."""
        rate, said = self.samples_per_s, self.predicted
        if rate is None or not said.step_s or not said.samples_per_s:
            return said
        step_s = said.step_s * said.samples_per_s / rate
        return replace(
            said,
            step_s=step_s,
            samples_per_s=rate,
            low_samples_per_s=min(self.rates),
            high_samples_per_s=max(self.rates),
        )

    @property
    def error(self) -> float:
        """The standard error of that, in samples/s; ``nan`` where there are too few turns to tell."""
        if len(self.rates) < TURNS_WITH_AN_ERROR:
            return math.nan
        return _MEDIAN_ERROR * statistics.stdev(self.rates) / math.sqrt(len(self.rates))

    @property
    def doubt(self) -> float:
        """Return what is left to chance when it is compared with others, in samples/s."""
        if not self.rates:
            return math.inf
        median = statistics.median(self.rates)
        return _UNKNOWN * median if math.isnan(self.error) else max(self.error, _LEAST * median)


class Record:
    """Everything that was looked at, in that order.

    Attributes:
        start: what all is compared with.
        candidates: whose memory is known.
        refused: under which no step was possible, and why.
    """

    def __init__(self, start: Settings) -> None:
        self.start = start
        self.candidates: dict[Settings, Candidate] = {}
        self.refused: dict[Settings, str] = {}

    @property
    def measured(self) -> list[Candidate]:
        """Return what fits and was measured."""
        return [one for one in self.candidates.values() if one.usable]

    @property
    def contenders(self) -> list[Candidate]:
        """Those of them that can be the answer."""
        return contenders(self.measured, self.start)

    @property
    def fastest(self) -> Candidate | None:
        """Of these, of those with as many turns as any; ``None`` while nothing was measured."""
        return fastest(self.contenders)


def contenders(measured: Sequence[Candidate], start: Settings) -> list[Candidate]:
    """Those that can be the answer: what has room, and what all is compared with; everything where nothing has room."""
    if all(one.tight for one in measured):
        return list(measured)
    return [one for one in measured if not one.tight or one.settings == start]


def fastest(measured: Sequence[Candidate]) -> Candidate | None:
    """The entry with most samples/s among those with as many turns as any."""
    most = max((len(one.rates) for one in measured), default=0)
    # While a round goes on, settings that had no turn in it yet still take part.
    return max((one for one in measured if len(one.rates) >= most - 1), key=speed_of, default=None)


def speed_of(candidate: Candidate) -> float:
    """Samples/s; none where nothing was measured."""
    return candidate.samples_per_s or 0.0


def pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those of which no other one is faster with as little reserved memory, from the least memory to the most."""
    front: list[Candidate] = []
    for one in sorted(candidates, key=lambda other: (other.predicted.reserved_peak_bytes, -speed_of(other))):
        if not front or speed_of(one) > speed_of(front[-1]):
            front.append(one)
    return front


_STEPS = 2  # of a turn where steps take long: one warms up, one is timed


class TrialTimes:
    """The times of small steps and of turns of whole steps, measured by the kernel that waits for them.

    Attributes:
        longest_s: of a single one.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._small_s = 0.0
        self._turns_s: dict[Settings, float] = {}  # the latest of each: a first one may compile
        self._sample_s: dict[Settings, float] = {}  # for a sample on one rank

    def small_steps(self, seconds: float) -> None:
        """Small steps took so long."""
        self._small_s = seconds
        self.longest_s = max(self.longest_s, seconds)

    def first_step(self, seconds: float) -> None:
        """The first step in a precision took so long, which says nothing of others."""
        self.longest_s = max(self.longest_s, seconds)

    def turn(self, settings: Settings, seconds: float, step_s: float | None) -> None:
        """A turn took so long, and one of its steps ``step_s``; ``None`` where it was not possible."""
        self._turns_s[settings] = seconds
        self.longest_s = max(self.longest_s, seconds)
        if step_s is not None:
            self._sample_s[settings] = step_s / settings.samples_per_rank

    def ahead_s(self, settings: Settings, known: bool) -> float:
        """Seconds until they are measured, small steps before included unless it is ``known`` whether they fit."""
        small_s = 0.0 if known else self._small_s
        if settings in self._turns_s:
            return small_s + self._turns_s[settings]
        # A turn has some steps at least, and short ones until it is long enough to be timed.
        each_s = statistics.median(self._sample_s.values()) if self._sample_s else 0.0
        return small_s + max(_STEPS * each_s * _timed(settings), max(self._turns_s.values(), default=0.0))


def _timed(settings: Settings) -> int:
    """Samples on one rank of what is timed in place of a step: of many micro-batches two, and one."""
    count = settings.accumulation_steps
    samples: int = settings.batch_size * (count if count <= 2 else 3)
    return samples
