"""Files of training state, in words: one that was saved or resumed, and the automatic snapshots that there are."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..shared.units import format_bytes
from .tables import Report, Table

_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"))


@dataclass(frozen=True)
class StateFile:
    """A training state that was saved or resumed; ``bytes`` is the file's size, ``seconds`` what it took."""

    done: str
    path: Path
    bytes: int
    steps: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.done} {self.path}: step {self.steps}, {format_bytes(self.bytes)}, {self.seconds:.1f} s"

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """One automatic snapshot.

    Attributes:
        path: its file.
        workload, steps, ranks: what was trained, for how long, and on how many ranks.
        created: seconds since the epoch.
        own: whether it is of this notebook.
        notebook: where its session was; empty if that is not known.
        over: whether that session is known to be over.
    """

    path: Path
    workload: str
    steps: int
    ranks: int
    created: float
    own: bool
    notebook: str
    over: bool

    @property
    def age(self) -> str:
        """Return how long ago it was taken, in words."""
        seconds = max(0.0, time.time() - self.created)
        for size, unit in _UNITS:
            if count := int(seconds // size):
                return f"{count} {unit}{'s' * (count != 1)}"
        return "just now"

    @property
    def of(self) -> str:
        """Return in words which session it belongs to."""
        if self.own:
            return "this notebook"
        return (self.notebook or "another session") + ("" if self.over else " (may still run on another machine)")


@dataclass(frozen=True, slots=True, repr=False)
class Snapshots(Report):
    """The automatic snapshots that can be resumed from, those of this notebook first."""

    rows: tuple[SnapshotRow, ...]

    @property
    def shown(self) -> list[Table | str]:
        """The table, and what to type."""
        if not self.rows:
            return ["There is no automatic snapshot."]
        headings, words = ("model", "step", "ranks", "age", "of", "path"), frozenset({"model", "of", "path"})
        rows = [(row.workload, f"{row.steps:,}", f"{row.ranks}", row.age, row.of, str(row.path)) for row in self.rows]
        return [Table("", headings, tuple(rows), words), "Go on from one of them: %hvd_resume PATH"]

    @property
    def records(self) -> list[dict[str, Any]]:
        """One for each snapshot."""
        return [dataclasses.asdict(row) for row in self.rows]
