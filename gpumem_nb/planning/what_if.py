"""What other settings would need, side by side: flips, precision and checkpointing, and settings of the allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..report.differences import arrows
from ..report.instead import Instead
from ..report.tables import Report, Table
from ..shared.allocator_settings import AllocatorSettings
from ..shared.errors import InvalidInput
from ..shared.knobs import KNOBS
from ..shared.settings import Settings
from ..shared.units import format_bytes, format_rate
from ..shared.workload import WorkloadInfo
from .prediction import DOES_NOT_FIT, FITS, Prediction

UNMOVED = 0.005  # of the live peak: what changes it by less says nothing about memory


def single_flips(settings: Settings, workload: WorkloadInfo) -> Iterator[tuple[str, Settings]]:
    """Yield each knob that moves memory, with the settings for each other value that the workload allows.

    Of numbers, half and twice what they are. What is asked alone is left out.
    """
    for name, knob in KNOBS.items():
        idle = not knob.moves or (knob.acts and not knob.acts(settings))
        if idle or knob.asked_alone or (name == "batch_size" and workload.data.batched):
            continue
        now = getattr(settings, name)
        values: Sequence[Any] = knob.choices
        if not values and not isinstance(now, bool):
            if isinstance(now, int):
                values = [now // 2, now * 2]
            elif isinstance(now, float):
                values = [now / 2, now * 2]
        for value in values:
            if value == now or (knob.refuses and knob.refuses(value, workload)):
                continue
            with suppress(InvalidInput):  # half or twice of it may not be allowed
                yield name, settings.replace(**{name: value})


@dataclass(frozen=True, repr=False)
class WhatIf(Report):
    """The memory each flip would need, beside the present need.

    Attributes:
        now: the present settings.
        flips: the others.
    """

    now: Prediction
    flips: tuple[Prediction, ...]

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each flip, the present settings first."""
        return [
            {"flip": self._flip(one), **one.columns, "mathematics": one.settings.mathematics(self.now.settings)}
            for one in (self.now, *self.flips)
        ]

    @property
    def shown(self) -> list[Table]:
        """One table."""
        rows = tuple(
            (
                self._flip(one),
                one.verdict,
                one.in_words(one.live_peak_bytes),
                self._change(one),
                one.in_words(one.reserved_peak_bytes),
                format_rate(one.samples_per_s),
                one.settings.mathematics(self.now.settings),
            )
            for one in (self.now, *self.flips)
        )
        limit = format_bytes(self.now.limit_bytes) if self.now.limit_bytes else "n/a"
        headings = ("flip", "verdict", "live peak", "change", "reserved", "samples/s", "mathematics")
        return [Table(f"What if (limit {limit})", headings, rows, frozenset({"flip", "verdict", "mathematics"}))]

    def _flip(self, one: Prediction) -> str:
        return arrows(self.now.settings, one.settings) or "as it is"

    def _change(self, one: Prediction) -> str:
        if one.lower_bound or self.now.lower_bound:
            return ""
        share = one.live_peak_bytes / max(1, self.now.live_peak_bytes) - 1
        return "" if abs(share) < UNMOVED else f"{100 * share:+.0f} %".replace("-", "−")


ROWS, COLUMNS = "precision", "checkpointing"
NONE = "nothing fits"


@dataclass(frozen=True)
class Cell:
    """One precision with one checkpointing.

    Attributes:
        precision, checkpointing: which.
        largest: samples of the largest micro-batch that fits every rank, the error included; 0 if none does.
        all_samples: whether an epoch has no more samples for it, so that memory is not what ends it.
        predicted: what that needs; of the smallest that was asked about if none fits.
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
        instead: what fits in place of the present settings where no cell does.
    """

    cells: tuple[Cell, ...]
    now: Settings
    limit_bytes: int | None
    failed: dict[tuple[str, str], str]
    _set: Callable[[dict[str, Any]], object] = field(repr=False, compare=False)
    instead: Instead | None = None

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
                "reserved_peak_bytes": cell.predicted.reserved_peak_bytes if cell.predicted and cell.largest else None,
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
        if self.instead and self.instead.offers:
            said.append(f"{self.instead.words(self.now)}, then ask again.")
        elif not any(cell.largest or cell.unknown for cell in self.cells):
            needs = [cell.predicted for cell in self.cells if cell.predicted]
            for one in sorted(needs, key=lambda need: (need.lower_bound, need.reserved_peak_bytes))[:1]:
                least = one.in_words(one.reserved_peak_bytes)
                said.append(f"One sample needs {least} with {one.settings.precision}, {one.settings.checkpointing}.")
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


_BYTES = ("live_peak_bytes", "reserved_peak_bytes", "low_bytes", "high_bytes", "limit_bytes")
UNCHANGED = 0.0005  # of reserved bytes: what would be shown as 0.0 %
MUCH = 0.02  # of reserved bytes: what a restart may be worth
_MODELLED = (
    "Memory is {}, followed three times by a model of torch's caching allocator, beginning with nothing cached. What "
    "earlier settings have left in pieces counts as it is, but not for expandable segments."
)
_VARIES = "Samples differ in size, which leaves more pieces than one step does: expandable_segments may save more."
_COLLECTS = "garbage_collection_threshold counts only for ranks with a memory limit: %hvd_start --memory-limit SIZE."


@dataclass(frozen=True, repr=False)
class AllocatorWhatIf(Report):
    """The same step under other settings of the caching allocator, on the rank that has least room under each.

    Attributes:
        now: how it is set at present, and what the step needs.
        others: other settings with the same.
        varies: whether the samples differ in size.
        virtual: whether the ranks have virtual GPUs.
        variable: by which the allocator is set.
        notes: sentences of the ranks on what is not modelled.
    """

    now: tuple[AllocatorSettings, Prediction]
    others: tuple[tuple[AllocatorSettings, Prediction], ...]
    varies: bool
    virtual: bool
    variable: str
    notes: tuple[str, ...] = ()

    def frame(self) -> Any:
        """Return the report as a pandas DataFrame; bytes are nullable integers."""
        return super().frame().astype({name: "Int64" for name in _BYTES})

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each setting, the present one first; bytes of the worst rank."""
        return [
            {"allocator": str(settings), **{name: one.columns[name] for name in ("verdict", *_BYTES)}}
            for settings, one in (self.now, *self.others)
        ]

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return how the figures were found, and how to have one of the settings."""
        now = self.now[1]
        best, one = min(self.others, key=lambda entry: entry[1].reserved_peak_bytes, default=self.now)
        if not self.others:
            advice = "That is the present setting."
        elif one.reserved_peak_bytes > (1 - MUCH) * now.reserved_peak_bytes and not _helps(now, one):
            advice = "None of them reserves much less."
        else:
            name = self.variable
            setting = f"%env {name}={best}" if str(best) else f"os.environ.pop('{name}')"
            advice = f"To have {_named(best)}: {setting} and %hvd_restart, which brings the training back."
        collects = any(settings.garbage_collection_threshold for settings, _ in self.others)
        return (
            _MODELLED.format(now.basis),
            *([_VARIES] if self.varies else []),
            *([_COLLECTS] if collects and not self.virtual else []),
            *self.notes,
            advice,
        )

    @property
    def shown(self) -> list[Table | str]:
        """Return the table and the sentences below it."""
        return [self._table, *self.sentences]

    @property
    def _table(self) -> Table:
        now = self.now[1]
        rows = tuple(
            (
                _named(settings) + (", as it is" if one is now else ""),
                one.verdict,
                format_bytes(one.reserved_peak_bytes),
                _change(one.reserved_peak_bytes, now.reserved_peak_bytes),
                format_bytes(one.reserved_peak_bytes - one.live_peak_bytes),
            )
            for settings, one in (self.now, *self.others)
        )
        limit = format_bytes(now.limit_bytes) if now.limit_bytes else "n/a"
        title = f"The caching allocator: live peak {format_bytes(now.live_peak_bytes)}, limit {limit}"
        headings = ("setting", "verdict", "reserved peak", "change", "reserved − live")
        return Table(title, headings, rows, frozenset({"setting", "verdict"}))


def _helps(now: Prediction, one: Prediction) -> bool:
    """Return whether settings that may not fit now would fit, or might."""
    return now.verdict not in (FITS, one.verdict) and one.verdict != DOES_NOT_FIT


def _named(settings: AllocatorSettings) -> str:
    return str(settings) or "torch's default"


def _change(then: int, now: int) -> str:
    share = then / max(1, now) - 1
    return "" if abs(share) < UNCHANGED else f"{100 * share:+.1f} %".replace("-", "−")
