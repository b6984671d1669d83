"""Files of training state, in words: one that was saved or resumed, and the automatic snapshots that there are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ..shared.units import format_bytes
from .tables import Table

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
        """How long ago it was taken, in words."""
        seconds = max(0.0, time.time() - self.created)
        for size, unit in _UNITS:
            if count := int(seconds // size):
                return f"{count} {unit}{'s' * (count != 1)}"
        return "just now"

    @property
    def of(self) -> str:
        """Whose it is, in words."""
        if self.own:
            return "this notebook"
        return (self.notebook or "another session") + ("" if self.over else " (may still run on another machine)")


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The automatic snapshots that can be resumed from, those of this notebook first."""

    rows: tuple[SnapshotRow, ...]

    def __str__(self) -> str:
        return f"{self._table}\nGo on from one of them: %hvd_resume PATH" if self.rows else _NONE

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table.html() if self.rows else f"<pre>{_NONE}</pre>"

    @property
    def _table(self) -> Table:
        rows = ((row.workload, f"{row.steps:,}", f"{row.ranks}", row.age, row.of, str(row.path)) for row in self.rows)
        return Table(
            "", ("model", "step", "ranks", "age", "of", "path"), tuple(rows), frozenset({"model", "of", "path"})
        )


_NONE = "There is no automatic snapshot."
