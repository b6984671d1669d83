"""The steps of all ranks as their critical path: a step is as long as that of the rank which is last in it.

So its parts are those that count, and what it takes longer than the other ranks is what they wait for.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from ..shared.messages import Sample
from ..shared.step_times import DATA, REDUCTION, StepTimes
from .speed import judged

FEWEST_STEPS = 12  # before anything is said
MOST_STEPS = 24  # the latest
_SLOWEST_SHARE = 0.04  # of them, which are left out: hiccups of the machine
_ALWAYS = 0.8  # of the steps: a rank that is last so often is slow itself
_WINDOW = 10  # steps, for telling since when a rank is slow
_PART_OF_NOW = 0.4  # of what it is slower by now: below, it was not slow yet


class CriticalPath:
    """Some steps, of which the rank counts that was last in each.

    Attributes:
        samples: all there are, of all ranks.
        rank: the one that was last most often.
        always: whether it was in nearly all steps.
        step_s: the mean of a step.
        operators, exact: as the ledger of such a step counts them; 0 where none was recorded.
        queued_s: as :class:`StepTimes` has it, as the mean of the last rank.
    """

    def __init__(self, samples: Sequence[Sequence[Sample]], steps: Sequence[tuple[StepTimes, ...]]) -> None:
        self.samples = samples
        lasts = [max(range(len(step)), key=[_work_s(times) for times in step].__getitem__) for step in steps]
        self._last = [step[last] for step, last in zip(steps, lasts, strict=True)]
        self._others = [step[:last] + step[last + 1 :] for step, last in zip(steps, lasts, strict=True)]
        self.rank, often = Counter(lasts).most_common(1)[0]
        self.always = len(samples) > 1 and often >= _ALWAYS * len(steps)
        self.step_s = self.mean(lambda times: times.total_s)
        self.queued_s = self.mean(queued_s)
        now = next((row[-1].settings_id for row in samples if row), 0)
        ledgers = (one.ledger for one in reversed(samples[self.rank]) if one.ledger and one.settings_id == now)
        ledger = next(ledgers, None)
        self.operators, self.exact = (ledger.operators, ledger.exact) if ledger else (0, True)

    @classmethod
    def of(cls, samples: Sequence[Sequence[Sample]], since_step: int) -> CriticalPath | None:
        """Of the latest steps that all ranks have done, without hiccups of the machine; ``None`` if they are few."""
        steps = list(_by_step([judged(of_rank, since_step) for of_rank in samples]).values())[-MOST_STEPS:]
        steps.sort(key=lambda step: max(times.total_s for times in step))
        kept = steps[: len(steps) - round(_SLOWEST_SHARE * len(steps))]
        after = [[one for one in of_rank if one.step > since_step] for of_rank in samples]
        return cls(after, kept) if len(steps) >= FEWEST_STEPS else None

    def mean(self, seconds: Callable[[StepTimes], float]) -> float:
        """Of the last rank, over the steps."""
        return statistics.fmean(map(seconds, self._last))

    def part(self, *names: str) -> float:
        """Return the mean of these parts together."""
        return self.mean(lambda times: sum(times[name] for name in names))

    def excess(self, seconds: Callable[[StepTimes], float]) -> float:
        """Return how much more it is than of the other ranks."""
        others = [statistics.fmean(map(seconds, rest)) for rest in self._others if rest]
        return self.mean(seconds) - statistics.fmean(others) if others else 0.0

    def excess_of(self, part: str) -> float:
        """Return how much longer a part takes the last rank than the others."""
        return self.excess(lambda times: times[part])

    @property
    def computing_excess_s(self) -> float:
        """Return how much longer it computes than the others, but for having no core."""
        return self.excess(_computing_s) - max(0.0, self.excess(queued_s))

    def slow_since(self) -> int:
        """Return the step from which on one rank takes longer than the others; 0 if it always did."""
        done = (sample.settings_id for row in self.samples for sample in reversed(row) if sample.done)
        latest = next(done, 0)
        steps = _by_step([[sample for sample in row if sample.settings_id == latest] for row in self.samples])
        numbers = sorted(steps, reverse=True)
        for place in range(_WINDOW, len(numbers) - _WINDOW, _WINDOW):
            before = [steps[number] for number in numbers[place : place + _WINDOW]]
            if statistics.median(map(self._longer_s, before)) < _PART_OF_NOW * self.computing_excess_s:
                return numbers[place - 1]
        return 0

    def _longer_s(self, step: Sequence[StepTimes]) -> float:
        others = [_computing_s(times) for rank, times in enumerate(step) if rank != self.rank]
        return _computing_s(step[self.rank]) - statistics.fmean(others)


def _by_step(rows: Sequence[Sequence[Sample]]) -> dict[int, tuple[StepTimes, ...]]:
    """Return the times of all ranks in each step that all have done, by its number."""
    of_ranks = [{sample.step: sample.times for sample in row if sample.done and sample.times} for row in rows]
    common = set.intersection(*map(set, of_ranks)) if of_ranks else set[int]()
    return {step: tuple(of_rank[step] for of_rank in of_ranks) for step in sorted(common)}


def _work_s(times: StepTimes) -> float:
    return times.total_s - times[REDUCTION]


def _computing_s(times: StepTimes) -> float:
    return _work_s(times) - times[DATA]


def queued_s(times: StepTimes) -> float:
    """Return how long it waited for a core, as far as that is known."""
    return times.queued_s or 0.0
