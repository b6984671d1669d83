"""Throughput on growing numbers of ranks: causes of loss, a forecast for more ranks, and the speed of messages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..shared.errors import InvalidInput
from ..shared.questions import SWEEP_BYTES
from ..shared.step_times import BACKWARD, COPY, DATA, FORWARD, PARTS, REDUCTION, UPDATE, StepTimes
from ..shared.units import as_whole, format_bytes, format_duration, format_rate
from .tables import Report, Table


@dataclass(frozen=True, repr=False)
class NetworkReport(Report):
    """All-reduces of all ranks.

    Attributes:
        ranks: how many there are.
        seconds: for each size in bytes, the median of the slowest rank.
    """

    ranks: int
    seconds: Mapping[int, float]

    def bus_bytes_per_s(self, size: int) -> float:
        """Return what each link carries, if messages go around in a ring: ``2 (n − 1) / n × size / seconds``.

        As NVIDIA's nccl-tests call it (their doc/PERFORMANCE.md); it can be compared with what the hardware does.
        """
        return 2 * (self.ranks - 1) / self.ranks * size / self.seconds[size]

    @property
    def latency_s(self) -> float:
        """Return how long the smallest message takes."""
        return self.seconds[min(self.seconds)]

    def predicted_s(self, size: float, ranks: int) -> float:
        """Return how long an all-reduce of ``size`` bytes takes on so many ranks, over links like these.

        Small messages meet in a tree, whose rounds grow as the logarithm of ``n``; of large ones each link of a ring
        carries ``2 (n − 1) / n`` (Thakur et al. 2005, Optimization of collective communication operations in MPICH).
        """
        if ranks < 2:
            return 0.0
        rounds = math.log2(ranks) / math.log2(self.ranks)
        largest = max(self.seconds)
        carried_s = max(0.0, self.seconds[largest] - self.latency_s) * size / largest
        more = (ranks - 1) / ranks / ((self.ranks - 1) / self.ranks)
        return rounds * self.latency_s + more * carried_s

    @property
    def records(self) -> list[dict[str, float]]:
        """A row for each size of message."""
        sizes = self.seconds.items()
        return [{"bytes": size, "seconds": took, "bus_bytes_per_s": self.bus_bytes_per_s(size)} for size, took in sizes]

    @property
    def shown(self) -> list[Table | str]:
        """Return the table and the sentences below it."""
        rows = tuple(
            (format_bytes(size), f"{1000 * seconds:.3g} ms", f"{format_bytes(round(self.bus_bytes_per_s(size)))}/s")
            for size, seconds in self.seconds.items()
        )
        headings = ("message", "time", "bus bandwidth")
        largest = max(self.seconds)
        left_out = f"Messages above {format_bytes(largest)} were left out: they would take seconds each."
        return [
            Table(f"All-reduces of {self.ranks} ranks", headings, rows, frozenset()),
            f"Latency {1000 * self.latency_s:.2g} ms, with Horovod's cycle_time_ms in it; bus bandwidth "
            f"{format_bytes(round(self.bus_bytes_per_s(largest)))}/s. Bus bandwidth: what each link carries, "
            "2 (ranks − 1) / ranks × message / time.",
            *([left_out] if largest < max(SWEEP_BYTES) else []),
        ]


FORECAST_RANKS = (8, 16, 64)
_COMPUTING = (FORWARD, BACKWARD, UPDATE)
_LOSSES = {"slower computing": _COMPUTING, "reduction": (REDUCTION,), "data": (DATA, COPY)}
_WORTH_A_WORD = 0.01  # of a step
_LEAST_ERROR = 0.1  # of a forecast for twice as many ranks, whatever the measured steps say


@dataclass(frozen=True, slots=True)
class Scaled:
    """Steps of so many ranks.

    Attributes:
        ranks: how many.
        steps: of each rank its steps, in the order in which all took them.
        samples: of one step of all ranks.
    """

    ranks: int
    steps: tuple[tuple[StepTimes, ...], ...]
    samples: int

    @property
    def each_s(self) -> list[float]:
        """Return what each step took: the mean of its ranks, which end it together."""
        return [statistics.fmean(times.total_s for times in of_step) for of_step in zip(*self.steps, strict=True)]

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.each_s)

    @property
    def samples_per_s(self) -> float:
        """Of all ranks."""
        return self.samples / self.step_s

    @property
    def spread(self) -> float:
        """Half of what lies between the quarters of steps, as a share of the median."""
        if len(self.each_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.each_s, n=4)
        return (high - low) / 2 / self.step_s

    def part_s(self, parts: Sequence[str]) -> float:
        """Return what these parts take of a step, as the median of its steps."""
        sums = [[sum(times[part] for part in parts) for times in of_step] for of_step in zip(*self.steps, strict=True)]
        return statistics.median(map(statistics.fmean, sums))


@dataclass(frozen=True, repr=False)
class ScalingReport(Report):
    """Throughput by the number of ranks.

    Attributes:
        measured: in growing numbers of ranks.
        network: all-reduces of all ranks that were measured; ``None`` for one rank.
        gradient_bytes: that each rank sends in a step.
        hosts: of ranks with virtual GPUs, the cores of each host and how many ranks share them, in the order in which
            hosts are filled; none with real GPUs.
        threads: of each rank.
    """

    measured: tuple[Scaled, ...]
    network: NetworkReport | None
    gradient_bytes: int
    hosts: tuple[tuple[int, int], ...]
    threads: int

    def efficiency(self, ranks: int) -> float:
        """Samples/s of each of so many ranks, measured or expected, beside those of each of the fewest measured.

        Raises:
            InvalidInput: not a whole number of at least 1.
        """
        ranks = _checked(ranks)
        found = {one.ranks: one.samples_per_s for one in self.measured}
        rate = found[ranks] if ranks in found else self.forecast(ranks)[0]
        return rate / ranks / (self._least.samples_per_s / self._least.ranks)

    def forecast(self, ranks: int) -> tuple[float, float]:
        """Samples/s of so many ranks, and the error of that as a share: from the most ranks measured, by a model.

        The error has two parts: how much single steps differ, and by how much the model missed the most ranks when it
        forecast them from fewer, for each doubling of ranks (at least a tenth, which is all where nothing can be held
        against it).

        Computing takes as long as on the ranks measured, but where they have virtual GPUs, which share their hosts'
        cores: these are shared by more. The reduction that backward does not hide grows as an all-reduce of the
        gradients does, over links like those measured.

        Raises:
            InvalidInput: not a whole number of at least 1.
        """
        ranks = _checked(ranks)
        most = self.measured[-1]
        doublings = math.log2(max(2.0, ranks / most.ranks))
        return self._forecast(most, ranks), math.hypot(most.spread, self._missed * doublings)

    def _forecast(self, one: Scaled, ranks: int) -> float:
        """Samples/s of so many ranks, from the steps of these."""
        crowding = self._crowding(ranks) / self._crowding(one.ranks)
        reduction = one.part_s([REDUCTION])
        computing = one.step_s - reduction
        if self.network and one.ranks > 1:
            predicted = self.network.predicted_s
            reduction *= predicted(self.gradient_bytes, ranks) / predicted(self.gradient_bytes, one.ranks)
        samples = one.samples // one.ranks * ranks
        return samples / (crowding * (computing + reduction))  # cores sum up gradients, too

    @property
    def _missed(self) -> float:
        """Return by which share a forecast misses for each doubling of ranks."""
        most = self.measured[-1]
        fewer = [one for one in self.measured[:-1] if one.ranks > 1]  # one rank alone shows no reduction
        misses = [
            abs(self._forecast(one, most.ranks) / most.samples_per_s - 1) / math.log2(most.ranks / one.ranks)
            for one in fewer
        ]
        return max([_LEAST_ERROR, *misses])

    def lost(self, one: Scaled) -> Mapping[str, float]:
        """Return the shares of a step lost compared with the fewest ranks, by cause."""
        more = {name: one.part_s(parts) - self._least.part_s(parts) for name, parts in _LOSSES.items()}
        return {name: seconds / one.step_s for name, seconds in more.items() if seconds > _WORTH_A_WORD * one.step_s}

    @property
    def records(self) -> list[dict[str, float]]:
        """A row for each number of ranks: samples/s, efficiency, seconds of a step and of its parts."""
        return [
            {
                "ranks": one.ranks,
                "steps": len(one.each_s),
                "samples_per_s": one.samples_per_s,
                "efficiency": self.efficiency(one.ranks),
                "step_s": one.step_s,
                **{f"{part}_s": one.part_s([part]) for part in PARTS},
            }
            for one in self.measured
        ]

    @property
    def shown(self) -> list[Table | str]:
        """Return the table and the sentences below it."""
        return [self._table, *self._notes]

    @property
    def _least(self) -> Scaled:
        return self.measured[0]

    def _crowding(self, ranks: int) -> float:
        """Return how many threads share a core where most do; more ranks than there are share all cores alike."""
        if ranks > sum(of_host for _, of_host in self.hosts):
            cores = sum(cores for cores, _ in self.hosts)
            return max(1.0, ranks * self.threads / cores) if cores else 1.0
        most, left = 1.0, ranks
        for cores, of_host in self.hosts:
            most, left = max(most, min(left, of_host) * self.threads / cores), left - min(left, of_host)
        return most

    @property
    def _table(self) -> Table:
        rows = [
            (
                str(one.ranks),
                format_rate(one.samples_per_s),
                f"{self.efficiency(one.ranks):.0%}",
                f"{format_duration(one.step_s)} ± {one.spread:.0%}",
                ", ".join(f"{name} {share:.0%}" for name, share in self.lost(one).items()) or "–",
            )
            for one in self.measured
        ]
        for ranks in FORECAST_RANKS:
            if ranks > self.measured[-1].ranks > 1:  # one rank alone shows no reduction
                rate, error = self.forecast(ranks)
                cell = f"{format_rate(rate)} ± {error:.0%}"
                rows.append((str(ranks), cell, f"{self.efficiency(ranks):.0%}", "n/a", "a forecast"))
        headings = ("ranks", "samples/s", "efficiency", "step", "lost to")
        steps = len(self._least.each_s)
        return Table(f"Scaling, median of {steps} steps", headings, tuple(rows), frozenset({"lost to"}))

    @property
    def _notes(self) -> list[str]:
        fewest = self._least.ranks
        notes = [f"efficiency: samples/s of each rank beside those on {fewest} rank{'s' * (fewest > 1)}."]
        if cores := sum(cores for cores, _ in self.hosts):
            notes.append(
                f"Ranks share {cores} core{'s' * (cores > 1)}; with more threads than these, each computes "
                "more slowly. With a GPU for each rank that loss is not there."
            )
        return notes


def _checked(ranks: int) -> int:
    if (count := as_whole(ranks, 1)) is None:
        raise InvalidInput(f"{ranks!r} ranks cannot be forecast: write a whole number of at least 1, such as 8.")
    return count
