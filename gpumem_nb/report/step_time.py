"""A report of the parts of a step's time on every rank."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..shared.messages import Sample
from ..shared.step_times import DATA, MEANING, PARTS, REDUCTION, StepLanes, StepTimes
from .bottleneck import Bottleneck
from .speed import Straggler, judged, of_first_step
from .tables import Report, Table

_ALL = "all"
_SLOWEST = " (slowest)"


@dataclass(frozen=True, slots=True)
class RankTime:
    """The mean over some steps of one rank.

    Attributes:
        rank: whose.
        steps: how many.
        times: the parts of one.
    """

    rank: int
    steps: int
    times: StepTimes

    @classmethod
    def of(cls, rank: int, samples: Sequence[Sample]) -> RankTime:
        """Average the steps whose times are known."""
        times = [sample.times for sample in samples if sample.times]
        seconds = {part: statistics.fmean(one[part] for one in times) for part in PARTS}
        hidden = [one.hidden_s for one in times if one.hidden_s is not None]
        return cls(rank, len(times), StepTimes.of(seconds, statistics.fmean(hidden) if hidden else None))

    @property
    def step_s(self) -> float:
        """A step; on GPUs of the device's time."""
        return self.times.total_s

    def share(self, part: str) -> float:
        """Of the step, between 0 and 1."""
        return self.times[part] / (self.step_s or 1)


@dataclass(frozen=True, repr=False)
class TimeReport(Report):
    """The parts of a step's time, as means over the latest steps under the present settings.

    Attributes:
        ranks: those of each rank, in their order.
        straggler: the rank that the others wait for, if one stands out.
        lanes: the latest step of each rank, part by part, if they were asked for.
        verdict: what time is lost to, if it was asked for and is worth a word.
        first: a sentence on a first step that took much longer, if it is still known.
    """

    ranks: tuple[RankTime, ...]
    straggler: Straggler | None = None
    lanes: tuple[StepLanes, ...] = ()
    verdict: Bottleneck | None = None
    first: str = ""

    @classmethod
    def of(cls, samples: Sequence[Sequence[Sample]], since_step: int = 0) -> TimeReport | None:
        """From a row of samples for each rank: those under the latest settings, without the first, which warm up.

        Those up to ``since_step`` count only while there are none after it. ``None`` before a step was done.
        """
        counted = [judged(of_rank, since_step) for of_rank in samples]
        if not any(counted):
            counted = [judged(of_rank, 0) for of_rank in samples]
        found = [RankTime.of(rank, of_rank) for rank, of_rank in enumerate(counted) if of_rank]
        first = of_first_step(sample for of_rank in samples for sample in of_rank)
        return cls(tuple(found), Straggler.of(counted), first=first) if found else None

    @property
    def waiting(self) -> float:
        """The share of a step in which ranks wait, for data or for gradients, as the mean of all ranks."""
        return self.share(DATA) + self.share(REDUCTION)

    def share(self, part: str) -> float:
        """Of a step, between 0 and 1, as the mean of all ranks."""
        return sum(one.share(part) for one in self.ranks) / len(self.ranks)

    @property
    def records(self) -> list[dict[str, float | None]]:
        """A row for each rank: how many steps, and the mean of a step and of each part in seconds."""
        return [{"rank": one.rank, "steps": one.steps, "step_s": one.step_s, **one.times.columns} for one in self.ranks]

    @property
    def shown(self) -> list[Table | str]:
        """Return the table and the sentences below it."""
        return [self._table, *self._notes]

    @property
    def _table(self) -> Table:
        slowest = self.straggler.rank if self.straggler else None
        rows = [self._row(f"{one.rank}{_SLOWEST if one.rank == slowest else ''}", [one]) for one in self.ranks]
        if len(self.ranks) > 1:
            rows.append(self._row(_ALL, self.ranks))
        headings = ("rank", "step", *PARTS, "hidden")
        hints = MEANING | {"hidden": "how much of backward gradients were already on their way"}
        steps = self.ranks[0].steps
        title = f"Time of a step in ms, mean of {steps} step{'s' if steps > 1 else ''}"
        return Table(title, headings, tuple(rows), frozenset({"rank"}), hints=hints)

    def _row(self, name: str, ranks: Sequence[RankTime]) -> tuple[str, ...]:
        count = len(ranks)
        parts = [
            _cell(sum(one.times[part] for one in ranks) / count, sum(one.share(part) for one in ranks) / count)
            for part in PARTS
        ]
        hidden = [one.times.hidden_s for one in ranks if one.times.hidden_s is not None]
        step_s = sum(one.step_s for one in ranks) / count
        return (name, _milliseconds(step_s), *parts, _milliseconds(sum(hidden) / len(hidden)) if hidden else "n/a")

    @property
    def _notes(self) -> list[str]:
        notes = [f"Ranks wait {100 * self.waiting:.0f} % of a step, for data or for gradients."]
        notes += [f"{str(self.straggler).capitalize()}."] if self.straggler else []
        notes += [self.first] if self.first else []
        return [*notes, str(self.verdict)] if self.verdict else notes


def aligned(lanes: Sequence[StepLanes], hosts: Sequence[str]) -> list[StepLanes]:
    """Return the same steps by one clock: hosts' clocks differ, but all ranks leave the last reduction together.

    Args:
        lanes: of some ranks.
        hosts: of all ranks, by their numbers.
    """
    later_s = behind(lanes, hosts)
    return [lane.moved(later_s[lane.rank]) for lane in lanes]


def behind(lanes: Sequence[StepLanes], hosts: Sequence[str]) -> dict[int, float]:
    """For each of these ranks how many seconds its host's clock is behind that of the first one's host."""
    ends_s: dict[str, float] = {}
    for lane in lanes:
        reduced = [lap.ended_s for lap in lane.parts if lap.name == REDUCTION] or [lane.parts[-1].ended_s]
        ends_s[hosts[lane.rank]] = max(ends_s.get(hosts[lane.rank], -math.inf), reduced[-1])
    return {lane.rank: ends_s[hosts[lanes[0].rank]] - ends_s[hosts[lane.rank]] for lane in lanes}


def _cell(seconds: float, share: float) -> str:
    return f"{_milliseconds(seconds)}\u00a0{100 * share:3.0f}\u00a0%"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
