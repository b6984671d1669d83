"""Every configuration tried, side by side: shown, sorted, compared, noted upon, and written for other programs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...shared.categories import CATEGORIES
from ...shared.errors import InvalidInput, nearest
from ...shared.step_times import PARTS
from ..answered import Answered, answers_below
from ..speed import not_comparable
from ..tables import Report, Table, notes_html
from ..written import Written
from . import columns
from .columns import Around, Column, latest, order, sortable
from .comparing import Comparison
from .files import NOTHING, write
from .row import Row

_HIGHEST_FIRST = ("samples_per_s", "samples_per_s_low", "samples_per_s_high", "headroom")
_MARKS = dict.fromkeys([("mark", "best"), ("mark", "best, now")], "var(--jp-success-color0, #2e7d32)")
_ABOUT = (
    "batch = micro-batch × accumulation × ranks; live peak, reserved and headroom (what reserved bytes leave free of "
    "the limit): worst rank; samples/s: all ranks, median ± half of what lies between the quarters of steps; best: "
    "most samples/s of a model on as many ranks of a device; predicted: the live peak, by how much it was too high, "
    "and samples/s."
)
FIGURES = (
    *("run", "workload", "ranks", "global_batch", "steps", "samples", "live_peak_bytes", "reserved_peak_bytes"),
    *("headroom", "samples_per_s", "loss", "predicted_live_peak_bytes"),
)
"""Columns of :meth:`Runs.frame` that people sort by, besides knobs."""


@dataclass(frozen=True, repr=False, eq=False)
class Runs(Report):
    """Every configuration tried, side by side; rows are named by their numbers.

    **Loss at equal samples** is the mean loss over the last quarter of the first N samples that all ranks together saw
    since the flip. N is the same for all rows of a model: what the one of them has seen that saw least, of those
    with at least five steps that did not fail. Each run began where training stood at its flip: a later one may have
    begun lower.

    Attributes:
        rows: by their numbers, or in the order in which they are to be shown.
        note_row: keeps the user's words about the row with a key.
        draw: shows the charts of two rows in a notebook.
        is_unfolded: whether a table shows rows of one step, too.
        among: what all rows say of these, where these are a part of them.
        answers: what doctor and tuner have answered meanwhile, the earliest first.
    """

    rows: Sequence[Row]
    note_row: Callable[[str, str], None] = lambda key, text: None
    draw: Callable[[Comparison], None] | None = None
    is_unfolded: bool = False
    among: Around | None = None
    answers: tuple[Answered, ...] = ()

    @cached_property
    def _around(self) -> Around:
        return self.among or Around.of(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, number: int) -> Row:
        """Return the row with this number.

        Raises:
            InvalidInput: there is none.
        """
        found = next((row for row in self.rows if row.number == number), None)
        if found is None or isinstance(number, bool):
            there = f"there are 1 to {max(row.number for row in self.rows)}" if self.rows else NOTHING
            raise InvalidInput(f"There is no run {number!r}: {there.rstrip('.')}.")
        return found

    @property
    def unfolded(self) -> Runs:
        """The same, whose table shows rows of one step, too."""
        return replace(self, is_unfolded=True, among=self._around)

    def latest(self, most: int) -> Runs:
        """Those that began last, and that of now; what is best and the loss are still told beside all."""
        return replace(self, rows=latest(self.rows, most), among=self._around)

    def sorted(self, by: str) -> Runs:
        """Return the rows sorted by a column of :meth:`frame`: throughput and headroom from the highest, others lowest.

        ``loss`` is what the table shows, the loss at equal samples, not that of the last step.

        Raises:
            InvalidInput: no such column.
        """
        by = columns.SHOWN_AS.get(by, by)
        if self.rows and by not in self.records[0]:
            raise InvalidInput(f"There is no column {by!r}: {nearest(by, self.records[0])}.")
        places = order([record[by] for record in self.records], highest_first=by in _HIGHEST_FIRST)
        return replace(self, rows=[self.rows[place] for place in places], among=self._around)

    def compare(self, a: int, b: int) -> Comparison:
        """Two rows side by side: what was changed, what came of it, and which memory and which time moved.

        Raises:
            InvalidInput: there is no such row.
        """
        return Comparison(self[a], self[b], self.draw)

    def note(self, number: int, text: str) -> None:
        """Keep words of your own beside a row; an empty text takes them away.

        Raises:
            InvalidInput: there is no such row.
        """
        self.note_row(self[number].key, " ".join(str(text).split()))

    def export(self, path: str | os.PathLike[str]) -> Written:
        """Write all rows to a file: ``.csv``, ``.parquet`` (needs pyarrow), or ``.html``, a page that sorts.

        Raises:
            InvalidInput: another kind of file, or one that cannot be written or is of something else.
            SetupError: there is no pyarrow that pandas can use.
        """
        return write(path, len(self), self.frame, self.unfolded._repr_html_)

    @property
    def shown(self) -> list[Table | str]:
        """Return the table and the sentences below it."""
        return [self._table, *self._notes] if self.rows else [NOTHING]

    def _repr_html_(self) -> str:
        if not self.rows:
            return super()._repr_html_()
        by_key = {row.key: record for row, record in zip(self.rows, self.records, strict=True)}
        values = [
            [by_key[row.key][column.by] if column.by else column.cell(row) for row in self._shown]
            for column in self._columns
        ]
        return sortable(self._table, values) + notes_html(self._notes)

    @cached_property
    def _shown(self) -> list[Row]:
        return [row for row in self.rows if self.is_unfolded or not row.folds]

    @cached_property
    def _columns(self) -> list[Column]:
        return columns.columns(self._shown, self._around)

    @cached_property
    def _table(self) -> Table:
        found = self._columns
        rows = tuple(tuple(column.cell(row) for column in found) for row in self._shown)
        words = frozenset(column.heading for column in found if column.of_words)
        return Table("", tuple(column.heading for column in found), rows, words, _MARKS)

    @property
    def _notes(self) -> list[str]:
        shown = self._shown
        notes = [f"The same in all: {columns.the_same(shown)}."] if shown else []
        if folded := [str(row.number) for row in self.rows if row.folds and not self.is_unfolded]:
            some = ", ".join(folded[:8]) + (" …" if len(folded) > 8 else "")
            which = f"run {some} is folded away: it" if len(folded) == 1 else f"runs {some} are folded away: each"
            notes.append(f"{which[:1].upper()}{which[1:]} has one step (%hvd_runs --all shows all).")
        notes.append(_ABOUT)
        if any(a.model == b.model and a.settings == b.settings for a, b in pairwise(self.rows)):
            notes.append(
                "Under equal settings another run begins after a cell on the ranks, which may change the model, an "
                "interrupt or a restart."
            )
        busiest = max(
            (row for row in shown if row.speed), key=lambda row: row.speed.starved if row.speed else 0, default=None
        )
        if busiest and (why := not_comparable(busiest.speed, None)):
            notes.append(f"samples/s and best are {why} (run {busiest.number}).")
        compared = {row.model for row in shown if self._around.loss(row) is not None}
        if compared:
            sizes = sorted({self._around.samples[model] for model in compared})
            after = " or ".join(f"{size:,}" for size in sizes)
            each = ", by model" if len(sizes) > 1 else ""
            notes.append(
                f"loss: after {after} samples of all ranks since the flip{each}, which all runs of at least five "
                "steps that went well have seen; the mean over the last quarter of them. Each run began where training "
                "stood at its flip."
            )
        return [*notes, *answers_below(self.answers)]

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """A row for each configuration: its settings and all that was measured; bytes, seconds and shares as names say.

        ``NAME_bytes`` of a category is what it takes of the live peak, ``data_s`` and so on are the parts of a step,
        ``loss`` is that of the last step; ``loss_at_equal_samples`` is after ``loss_samples``, as the class says.
        """
        return [self._record(row) for row in self.rows]

    def _record(self, row: Row) -> dict[str, Any]:
        """Return a row of the frame. Numbers that are not known are ``nan``, so that columns of numbers stay such."""
        speed, foretold, samples = row.speed, row.foretold, self._around.samples.get(row.model)
        equal = self._around.loss(row)
        return {
            "run": row.number,
            "workload": row.workload,
            "options": " ".join(f"{name}={value:g}" for name, value in row.options),
            "parameters": _number(row.parameters),
            **row.settings.as_dict(),
            "ranks": row.ranks,
            "device": row.device,
            "device_memory_bytes": _number(row.device_memory_bytes),
            "driver": row.driver,
            "global_batch": row.global_batch,
            "steps": row.steps,
            "samples": row.samples,
            "live_peak_bytes": _number(row.peak_bytes),
            "reserved_peak_bytes": _number(row.reserved_peak_bytes),
            "headroom": _number(row.headroom),
            "samples_per_s": _number(row.samples_per_s),
            "samples_per_s_low": speed.low if speed else math.nan,
            "samples_per_s_high": speed.high if speed else math.nan,
            "loss": _number(row.loss),
            "loss_at_equal_samples": _number(equal),
            "loss_samples": _number(samples if equal is not None else None),
            "predicted_live_peak_bytes": foretold.live_peak_bytes if foretold else math.nan,
            "predicted_reserved_peak_bytes": foretold.reserved_peak_bytes if foretold else math.nan,
            "predicted_samples_per_s": _number(foretold.samples_per_s if foretold else None),
            "predicted_verdict": foretold.verdict if foretold else "",
            "predicted_lower_bound": foretold is not None and foretold.lower_bound,
            **{f"{name.replace(' ', '_')}_bytes": row.categories.get(name, math.nan) for name in CATEGORIES},
            **{f"{name}_s": row.parts.get(name, math.nan) for name in PARTS},
            "outcome": row.outcome,
            "best": row.key in self._around.best,
            "present": row.present,
            "came_from": row.came_from.encode("utf-8", "backslashreplace").decode(),  # a name may be no text
            "began_s": row.began_s,
            "note": row.note,
        }


def _number(value: float | None) -> float:
    return math.nan if value is None else value
