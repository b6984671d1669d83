"""The speed of messages between the ranks: a table of sizes, and the two numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..shared.questions import SWEEP_BYTES
from ..shared.units import format_bytes
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
        return [self._table, *self._notes]

    @property
    def _table(self) -> Table:
        rows = tuple(
            (format_bytes(size), f"{1000 * seconds:.3g} ms", f"{format_bytes(round(self.bus_bytes_per_s(size)))}/s")
            for size, seconds in self.seconds.items()
        )
        return Table(f"All-reduces of {self.ranks} ranks", ("message", "time", "bus bandwidth"), rows, frozenset())

    @property
    def _notes(self) -> list[str]:
        largest = max(self.seconds)
        left_out = f"Messages above {format_bytes(largest)} were left out: they would take seconds each."
        return [
            f"Latency {1000 * self.latency_s:.2g} ms, with Horovod's cycle_time_ms in it; bus bandwidth "
            f"{format_bytes(round(self.bus_bytes_per_s(largest)))}/s. Bus bandwidth: what each link carries, "
            "2 (ranks − 1) / ranks × message / time.",
            *([left_out] if largest < max(SWEEP_BYTES) else []),
        ]
