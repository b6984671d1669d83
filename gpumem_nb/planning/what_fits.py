"""The largest micro-batch that fits under each precision and checkpointing, and how fast it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..report.differences import typed
from ..report.tables import Report, Table
from ..shared.errors import InvalidInput
from ..shared.settings import Settings
from ..shared.units import format_bytes, format_rate
from .prediction import Prediction

ROWS, COLUMNS = "precision", "checkpointing"
NONE = "nothing fits"


@dataclass(frozen=True)
class Cell:
    """One precision with one checkpointing.

    Attributes:
        precision, checkpointing: which.
        largest: samples of the largest micro-batch that fits every rank, the error included; 0 if none does.
        all_samples: whether an epoch has no more samples for it, so that memory is not what ends it.
        predicted: what that needs; ``None`` if none fits.
        samples_per_s: of all ranks; ``None`` if it was not measured.
        measured_at: the micro-batch that it was measured with, which is a smaller one where steps would take long.
        settings: the present ones with these; ``None`` if none fits.
        unknown: why it cannot be said whether any fits; else empty.
    """

    precision: str
    checkpointing: str
    largest: int
    all_samples: bool = False
    predicted: Prediction | None = None
    samples_per_s: float | None = None
    measured_at: int = 0
    settings: Settings | None = None
    unknown: str = ""

    @property
    def words(self) -> str:
        """The micro-batch and its throughput, in two lines."""
        if not self.largest:
            return "n/a" if self.unknown else NONE
        about = "≈ " if self.samples_per_s and self.measured_at != self.largest else ""
        return f"{self.largest}{'*' * self.all_samples}\n{about}{format_rate(self.samples_per_s)} samples/s"


@dataclass(frozen=True, repr=False)
class WhatFits(Report):
    """The largest micro-batch under each precision and checkpointing.

    Attributes:
        cells: precision by precision.
        now: the present settings.
        limit_bytes: of the rank with least room; ``None`` without one.
        failed: what could not be found out, and why, by precision and checkpointing.
        instead: what fits with another knob where no cell does.
    """

    cells: tuple[Cell, ...]
    now: Settings
    limit_bytes: int | None
    failed: dict[tuple[str, str], str]
    _set: Callable[[dict[str, Any]], object] = field(repr=False, compare=False)
    instead: Prediction | None = None

    def apply(self, precision: str, checkpointing: str) -> None:
        """Train under the largest micro-batch of a cell from the next chunk on.

        Raises:
            InvalidInput: there is no such cell, or nothing fits there.
        """
        place = precision, checkpointing
        cell = next((cell for cell in self.cells if (cell.precision, cell.checkpointing) == place), None)
        if cell is None or cell.settings is None:
            why = self.failed.get(place, "it was not tried")
            if cell is not None:
                why = cell.unknown or "not even one sample fits there"
            fit = [f"{one.precision} {one.checkpointing}" for one in self.cells if one.settings]
            there = f" What fits: {', '.join(fit)}." if fit else ""
            raise InvalidInput(f"{precision} {checkpointing} cannot be applied: {why.rstrip('.')}.{there}")
        self._set({ROWS: precision, COLUMNS: checkpointing, "batch_size": cell.largest})

    @property
    def frontier(self) -> tuple[Cell, ...]:
        """Cells of which no other one has as large a micro-batch and is faster, or as fast and has a larger one."""
        fitting = [cell for cell in self.cells if cell.largest and cell.samples_per_s]
        return tuple(cell for cell in fitting if not any(_beats(other, cell) for other in fitting))

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each cell; ``largest_batch`` is 0 where nothing fits, and not known where that cannot be said."""
        frontier = self.frontier
        return [
            {
                ROWS: cell.precision,
                COLUMNS: cell.checkpointing,
                "largest_batch": None if cell.unknown else cell.largest,
                "reserved_peak_bytes": cell.predicted.reserved_peak_bytes if cell.predicted else None,
                "samples_per_s": cell.samples_per_s,
                "measured_at": cell.measured_at,
                "frontier": cell in frontier,
            }
            for cell in self.cells
        ]

    @property
    def notes(self) -> list[str]:
        """Return what the table does not say."""
        limit = f" {format_bytes(self.limit_bytes)}" if self.limit_bytes else ""
        said = [
            f"The largest micro-batch of a rank that fits{limit}, with "
            f"accumulation_steps={self.now.accumulation_steps}, and samples/s of all ranks with it. Another size of "
            "the micro-batch changes the mathematics, unless accumulation_steps makes up for it."
        ]
        if any(cell.all_samples for cell in self.cells):
            said.append("* an epoch has no more samples for one step.")
        if any(cell.measured_at != cell.largest for cell in self.cells):
            said.append("≈ measured with a smaller micro-batch, because a step of the largest takes long.")
        said += [f"{one.precision}, {one.checkpointing}: {one.unknown}" for one in self.cells if one.unknown]
        if self.instead:
            flip = typed(self.now, self.instead.settings)
            peak = format_bytes(self.instead.live_peak_bytes)
            said.append(f"The present settings fit with {flip} (live peak {peak}): %hvd_set {flip}, then ask again.")
        said += [f"{precision}, {mode}: {why}" for (precision, mode), why in self.failed.items()]
        return said

    @property
    def shown(self) -> list[Table | str]:
        """The table and what it does not say."""
        return [self._table, *self.notes]

    @property
    def _table(self) -> Table:
        modes = list(dict.fromkeys(cell.checkpointing for cell in self.cells))
        found = {(cell.precision, cell.checkpointing): cell.words for cell in self.cells}
        rows = tuple(
            (precision, *(found.get((precision, mode), "n/a") for mode in modes))
            for precision in dict.fromkeys(cell.precision for cell in self.cells)
        )
        return Table("What fits", (ROWS, *(f"{COLUMNS} {mode}" for mode in modes)), rows, frozenset({ROWS}))


def _beats(other: Cell, cell: Cell) -> bool:
    ours, theirs = (cell.largest, cell.samples_per_s or 0.0), (other.largest, other.samples_per_s or 0.0)
    return ours != theirs and all(theirs[at] >= ours[at] for at in (0, 1))
