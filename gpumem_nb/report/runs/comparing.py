"""Two runs side by side: what was changed, what came of it, and why: which memory and which time moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...shared.categories import CATEGORIES
from ...shared.knobs import KNOBS
from ...shared.step_times import PARTS
from ...shared.units import format_bytes, format_rate
from ...shared.workload import Splits
from ..differences import arrows, mathematics
from ..speed import compared, not_comparable
from ..tables import Report, Table
from . import columns
from .columns import named
from .row import Row

_MOST_NAMED = 3  # of what moved, in the sentence
_WORTH_A_WORD = 0.01  # of the larger of both
_MINUS = ("-", "−")
_ENDED = {"oom": "ran out of memory", "error": "failed with an error"}


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """Two runs, the first of which is what the second is held against.

    Attributes:
        a, b: the runs.
        draw: shows their charts over each other in a notebook.
    """

    a: Row
    b: Row
    draw: Callable[[Comparison], None] | None = field(default=None, repr=False, compare=False)

    @property
    def changed(self) -> str:
        """Return in words what differs in the second run; empty if nothing does."""
        name_of = named([self.a, self.b])
        others = [
            f"{what} {before} → {after}"
            for what, before, after in (
                ("workload", name_of(self.a), name_of(self.b)),
                ("ranks", self.a.ranks, self.b.ranks),
                ("device", self.a.on, self.b.on),
            )
            if before != after
        ]
        return ", ".join(filter(None, [*others, arrows(self.a.settings, self.b.settings)]))

    @property
    def samples(self) -> int:
        """After how many samples of all ranks since the flip the losses are compared: what both have seen."""
        return min(self.a.samples, self.b.samples)

    @property
    def categories(self) -> dict[str, int]:
        """Return by how many bytes each category of the peak changed, largest first; empty if one is not known."""
        moved = {name: self.b.categories.get(name, 0) - self.a.categories.get(name, 0) for name in CATEGORIES}
        return _largest_first(moved) if self.a.categories and self.b.categories else {}

    @property
    def parts(self) -> dict[str, float]:
        """Return by how many seconds each part of a step changed, largest change first; empty if not known.

        Where steps of the two have other numbers of samples of the same model, it is what as many samples take as a
        step of the first.
        """
        moved = {part: self._scaled(part) - self.a.parts.get(part, 0.0) for part in PARTS}
        return _largest_first(moved) if self.a.parts and self.b.parts else {}

    @property
    def why(self) -> list[str]:
        """Return sentences on which memory and time changed, and which flip caused it."""
        return [*self._why_memory(), *self._why_time()]

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each figure, category and part: its name, unit, both values, and the second less the first."""
        rows: list[tuple[str, str, Any, Any]] = [
            (name, unit, value(self.a), value(self.b)) for name, unit, value, _ in self._figures
        ]
        of_a, of_b = self.a.categories, self.b.categories
        rows += [(name, "bytes", of_a.get(name, 0), of_b.get(name, 0)) for name in self.categories]
        rows += [(part, "s", self.a.parts.get(part), self._scaled(part)) for part in self.parts]
        first, second = f"run {self.a.number}", f"run {self.b.number}"
        return [
            {"what": name, "unit": unit, first: before, second: after, "change": _less(after, before)}
            for name, unit, before, after in rows
        ]

    @property
    def shown(self) -> list[Table | str]:
        """Return what was changed and its effects, as tables and in words."""
        return [*self._tables, *self._notes]

    def _ipython_display_(self) -> None:
        """Show it with its charts where ``draw`` was given; elsewhere IPython shows it as any other value."""
        if self.draw is None:
            raise NotImplementedError
        self.draw(self)

    @property
    def _busy(self) -> str:
        """Return why differences of times mean nothing; empty where they mean something."""
        return not_comparable(self.a.speed, self.b.speed)

    @property
    def _same_model(self) -> bool:
        return self.a.model == self.b.model

    @property
    def _as_measured(self) -> bool:
        """Return whether times are those of a step of each: samples of another model are other samples."""
        return self.a.global_batch == self.b.global_batch or not self._same_model

    def _scaled(self, part: str) -> float:
        scale = 1.0 if self._as_measured else self.a.global_batch / self.b.global_batch
        return self.b.parts.get(part, 0.0) * scale

    @property
    def _figures(self) -> list[tuple[str, str, Callable[[Row], Any], Callable[[Row], str]]]:
        """Name, unit, a run's value, and the same in words."""

        def loss(row: Row) -> float | None:
            return columns.loss_after(row, self.samples)

        return [
            ("steps", "", lambda row: row.steps, lambda row: f"{row.steps:,}"),
            ("live peak", "bytes", lambda row: row.peak_bytes, lambda row: format_bytes(row.peak_bytes)),
            ("predicted", "bytes", _said, lambda row: row.foretold.live_peak if row.foretold else "n/a"),
            (
                *("reserved", "bytes", lambda row: row.reserved_peak_bytes),
                lambda row: format_bytes(row.reserved_peak_bytes),
            ),
            ("headroom", "share", lambda row: row.headroom, lambda row: columns.headroom(row.headroom)),
            ("samples/s", "", lambda row: row.samples_per_s, lambda row: columns.rate(row.speed)),
            ("loss", "", loss, lambda row: columns.number(loss(row))),
        ]

    @property
    def _tables(self) -> list[Table]:
        heading = f"Run {self.a.number} → {self.b.number}: {self.changed or 'the same settings'}"
        figures = []
        for name, unit, value, words in self._figures:
            cells = [words(self.a), words(self.b)]
            busy = name == "samples/s" and self._busy
            if set(cells) != {"n/a"}:
                figures.append((name, *cells, "" if busy else _change(name, value(self.a), value(self.b), unit)))
        tables = [self._table(heading, "", figures)]
        if self.categories:
            rows = [
                (name, *(format_bytes(row.categories.get(name, 0)) for row in (self.a, self.b)), _size(moved))
                for name, moved in self.categories.items()
                if moved or self.a.categories.get(name)
            ]
            tables.append(self._table("Live peak by category, worst rank", "category", rows))
        if self.parts:
            rows = [
                (
                    part,
                    _ms(self.a.parts.get(part, 0.0)),
                    _ms(self._scaled(part)),
                    "" if self._busy else _ms(moved, sign="+"),
                )
                for part, moved in self.parts.items()
            ]
            title = "A step by part, mean of ranks"
            of = "" if self._as_measured else f", for {self.a.global_batch:,} samples"
            tables.append(self._table(title + of, "part", rows))
        return tables

    def _table(self, title: str, heading: str, rows: Sequence[tuple[str, ...]]) -> Table:
        headings = (heading, f"run {self.a.number}", f"run {self.b.number}", "change")
        return Table(title, headings, tuple(rows), frozenset({heading}))

    @property
    def _notes(self) -> list[str]:
        notes = [
            f"Run {row.number} {_ENDED.get(row.outcome, f'ended: {row.outcome}')}."
            for row in (self.a, self.b)
            if row.failed
        ]
        if self.a.speed or self.b.speed:
            notes.append(compared(self.a.speed, self.b.speed).join(("Throughput: ", ".")))
        notes += self.why
        if self._same_model and self.a.ranks != self.b.ranks:
            sizes = self.a.global_batch, self.b.global_batch
            kept = f"of {sizes[0]} as before" if sizes[0] == sizes[1] else f"of {sizes[1]} in place of {sizes[0]}"
            notes.append(f"On other ranks, steps have a global batch {kept}.")
            size, steps = self.a.settings.batch_size, self.a.settings.accumulation_steps
            apart = self.b.settings.replace(batch_size=size, accumulation_steps=steps)
            if apart != self.a.settings:
                notes.append(f"Apart from that, the change {mathematics(self.a.settings, apart)}.")
        elif self._same_model and self.a.settings != self.b.settings:
            does = mathematics(self.a.settings, self.b.settings, Splits(self.a.batch_norm or self.b.batch_norm))
            notes.append(f"The change {does}.")
        if columns.loss_after(self.a, self.samples) is not None:
            notes.append(
                f"loss: the mean over the last quarter of the first {self.samples:,} samples that all ranks saw since "
                "the flip; each run began where training stood then."
            )
        if self._same_model and self.a.of_same_ranks(self.b) and self.a.model_version != self.b.model_version:
            notes.append("A cell or a load in between may have changed the model or its data.")
        notes += [f"Run {row.number}: {row.note}" for row in (self.a, self.b) if row.note]
        return notes

    def _why_memory(self) -> list[str]:
        if self.a.peak_bytes is None or self.b.peak_bytes is None:
            return []
        moved = self.b.peak_bytes - self.a.peak_bytes
        least = _WORTH_A_WORD * max(self.a.peak_bytes, self.b.peak_bytes)
        named = {name: by for name, by in self.categories.items() if abs(by) >= least}
        if not named:
            return [] if abs(moved) >= least else ["The live peak did not move."]
        parts = [f"{name} {_size(by)}{self._knobs_of(name)}" for name, by in list(named.items())[:_MOST_NAMED]]
        return [f"Live peak {_size(moved)}: {', '.join(parts)}."]

    def _why_time(self) -> list[str]:
        if not self.parts or self._busy:
            return []
        before, after = sum(self.a.parts.values()), sum(map(self._scaled, PARTS))
        named = {part: by for part, by in self.parts.items() if abs(by) >= _WORTH_A_WORD * max(before, after)}
        what = "A step" if self._as_measured else f"As many samples as in a step of run {self.a.number}"
        if not named:
            return [f"{what} took as long, part by part."] if self._as_measured else []
        parts = [f"{part} {_ms(by, sign='+')}" for part, by in list(named.items())[:_MOST_NAMED]]
        return [f"{what}, {_ms(after - before, sign='+')}: {', '.join(parts)}."]

    def _knobs_of(self, category: str) -> str:
        """Return the changed knobs that move this category most, according to the table of knobs.

        None of another model or other ranks, which move it as well.
        """
        if not self._same_model or self.a.ranks != self.b.ranks:
            return ""
        before, after = self.a.settings, self.b.settings
        movers = {name: KNOBS[name].moves.get(category, 0) for name in after.changed_from(before)}
        if not any(movers.values()):
            return ""
        most = max(movers.values())
        told = [
            f"{name} {KNOBS[name].text(getattr(before, name))} → {KNOBS[name].text(getattr(after, name))}"
            for name, much in movers.items()
            if much == most
        ]
        return f" ({', '.join(told)})"


def _less(after: Any, before: Any) -> Any:
    return None if before is None or after is None else after - before


def _largest_first(moved: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(moved.items(), key=lambda entry: -abs(entry[1])))


def _said(row: Row) -> int | None:
    """The live peak that was predicted; a lower bound is none."""
    return row.foretold.live_peak_bytes if row.foretold and not row.foretold.lower_bound else None


def _change(name: str, before: Any, after: Any, unit: str) -> str:
    if before is None or after is None:
        return ""
    if unit == "bytes":
        return _size(after - before)
    if unit == "share":
        return f"{100 * (after - before):+.0f} points".replace(*_MINUS)
    moved = after - before
    if not math.isfinite(moved):
        return ""
    share = f" ({100 * moved / before:+.0f} %)" if before > 0 else ""  # of what is below 0 a share says nothing
    if isinstance(moved, int) or abs(moved) >= 1000:
        return f"{moved:+,.0f}{share}".replace(*_MINUS)
    sign = "-" if moved < 0 else "+"
    size = format_rate(abs(moved)) if name == "samples/s" else f"{abs(moved):.4g}"
    return f"{sign}{size}{share}".replace(*_MINUS)


def _size(moved: int) -> str:
    """Bytes with their sign."""
    return f"{'+' if moved > 0 else '−' if moved < 0 else '±'}{format_bytes(abs(moved))}"


def _ms(seconds: float, sign: str = "") -> str:
    return f"{1000 * seconds:{sign},.2f} ms".replace(*_MINUS)
