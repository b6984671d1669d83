"""What was taken of a trainer that was attached, and what was not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..shared.workload import Adopted
from .tables import Report, Table


@dataclass(frozen=True, slots=True, repr=False)
class AdoptedReport(Report):
    """A row for each knob or part that was taken, and a sentence for each thing that was not."""

    adopted: Adopted

    @property
    def shown(self) -> list[Table | str]:
        """What was taken from which argument, and what is not kept."""
        headings = ("what", "value", "from")
        rows = tuple((one.what, one.value, one.source) for one in self.adopted.taken)
        table = Table(f"Taken from {self.adopted.kind}", headings, rows, frozenset(headings))
        left_out = [f"Not kept: {sentence}" for sentence in self.adopted.left_out]
        return [table, *left_out]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The same as data."""
        return [{"what": one.what, "value": one.value, "from": one.source} for one in self.adopted.taken]
