"""A session's status in words, and what was saved or resumed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..shared.messages import RankInfo
from ..shared.settings import Settings
from ..shared.units import format_bytes
from ..shared.workload import WorkloadInfo
from .speed import Straggler
from .tables import Report


@dataclass(frozen=True, repr=False)
class Status(Report):
    """The state of a session: its ranks, their devices, and what they are doing."""

    doing: str
    ranks: tuple[RankInfo, ...]
    workload: WorkloadInfo | None
    settings: Settings
    steps: int
    snapshots: str
    ledger: str
    start_seconds: Mapping[str, float]
    others: tuple[str, ...] = ()
    straggler: Straggler | None = None
    compiled: str = ""

    def to_json(self) -> str:
        """Return the same as JSON, for programs."""
        return json.dumps(dataclasses.asdict(self) | {"settings": self.settings.as_dict()}, indent=2)

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each rank."""
        return [dataclasses.asdict(info) for info in self.ranks]

    @property
    def shown(self) -> list[str]:
        """Return what the session does, a line for each rank, and what is trained."""
        lines = [self.doing]
        for info in self.ranks:
            # The name of a virtual GPU says its limit.
            limit = "" if info.virtual else f" (limit {format_bytes(info.memory_limit)})"
            lines.append(
                f"rank {info.rank}: {info.device_name}{limit}, "
                f"{info.threads} thread{'s' * (info.threads != 1)}, {info.host} pid {info.pid}"
                + (f" ({info.note})" if info.note else "")
            )
        if self.workload:
            w = self.workload
            held_out = "" if w.eval_len is None else f" and {w.eval_len:,} to validate on"
            lines.append(
                f"workload {w.name}: {w.parameters:,} parameters ({format_bytes(w.parameter_bytes)}), "
                f"{'n/a' if w.dataset_len is None else f'{w.dataset_len:,}'} samples{held_out}, "
                f"{w.blocks} block{'s' * (w.blocks != 1)}"
            )
        lines.append(f"settings: {self.settings.in_short}")
        lines += [self.compiled] if self.compiled else []
        if self.workload:
            lines += [self.snapshots, self.ledger]
        if self.straggler:
            lines.append(str(self.straggler))
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.start_seconds.items())
        if self.others:
            lines.append(f"other processes: {'; '.join(self.others)}")
        lines.append(f"started in {sum(self.start_seconds.values()):.1f} s ({phases})")
        return lines


def describe_ledger(every: int, cost: float | None) -> str:
    """Return how often steps are recorded (one in ``every``; 0 for none), and the share of time that it has cost."""
    if not every:
        return "ledger: no step is recorded (%hvd_set ledger_steps=20 records one in 20)"
    costs = "" if cost is None else f", which costs {cost:.1%} of the time"
    return f"ledger: one step in {every} is recorded{costs}"
