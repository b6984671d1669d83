"""The columns of the table of runs: what is the same in all rows is told below it, once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ...shared.knobs import KNOBS
from ...shared.units import format_bytes, format_rate
from ..speed import Speed
from ..tables import Table
from .row import Row

_OF_BATCH = ("batch_size", "accumulation_steps")
BEST, NOW = "best", "now"
LOSS_WINDOW = 0.25  # of the samples that are compared: a single step's loss jumps


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of runs.

    Attributes:
        heading: above it.
        by: the column of the frame with the values by which rows are sorted; empty: by the words.
        cell: the words.
        of_words: whether it is set to the left.
    """

    heading: str
    by: str
    cell: Callable[[Row], str]
    of_words: bool = False


@dataclass(frozen=True)
class Around:
    """Facts about a row that depend on the other rows.

    Attributes:
        best: by model, ranks and device the row with most samples/s, by its key.
        samples: by model, how many samples all of its rows have seen that are compared.
        losses: by a row's key, what it lost after so many, see :func:`loss_after`; without those that are not known.
    """

    best: frozenset[str]
    samples: Mapping[tuple[object, ...], int]
    losses: Mapping[str, float]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Around:
        """Of all rows. Those of fewer than five steps are not compared; what failed sets no size where others do."""
        fastest: dict[tuple[object, ...], Row] = {}
        for row in rows:
            if row.comparable and not row.failed and row.samples_per_s:
                alike = row.model, row.ranks, row.device
                fastest[alike] = max(fastest.get(alike, row), row, key=lambda one: one.samples_per_s or 0)
        judged = [row for row in rows if row.comparable and len(row.curve)]
        went_well = {row.model for row in judged if not row.failed}
        samples: dict[tuple[object, ...], int] = {}
        for row in judged:
            if not row.failed or row.model not in went_well:
                samples[row.model] = min(row.samples, samples.get(row.model, row.samples))
        losses = {row.key: loss_after(row, samples[row.model]) for row in judged}
        known = {key: loss for key, loss in losses.items() if loss is not None}
        return cls(frozenset(row.key for row in fastest.values()), samples, known)

    def loss(self, row: Row) -> float | None:
        """Return the row's loss after as many samples as all rows of its model have seen, see :func:`loss_after`."""
        return self.losses.get(row.key)

    def mark(self, row: Row) -> str:
        """Return whether it is the best row or the present one."""
        return ", ".join(word for word, is_so in ((BEST, row.key in self.best), (NOW, row.present)) if is_so)


def loss_after(row: Row, samples: int) -> float | None:
    """Return the mean loss over the last quarter of the first ``samples`` samples that all ranks saw since the flip."""
    return row.curve.mean_loss((1 - LOSS_WINDOW) * samples, samples)


def columns(rows: Sequence[Row], around: Around) -> list[Column]:
    """Those that tell rows apart, and the figures."""

    def varies(value: Callable[[Row], object]) -> bool:
        return len({value(row) for row in rows}) > 1

    def there(value: Callable[[Row], object]) -> bool:
        return any(value(row) not in (None, "") for row in rows)

    differ = varying(rows)
    of_batch = varies(lambda row: row.ranks) or differ & set(_OF_BATCH)
    outcomes = varies(lambda row: row.outcome) or any(row.failed for row in rows)
    wanted = [
        (True, Column("run", "run", lambda row: str(row.number))),
        (there(around.mark), _words("mark", around.mark)),
        (there(lambda row: row.came_from), _words("from", lambda row: row.came_from)),
        (varies(lambda row: row.model), _words("workload", named(rows))),
        (varies(lambda row: row.on), _words("device", lambda row: row.on)),
        (of_batch, Column("batch", "global_batch", batch)),
        *((name in differ and name not in _OF_BATCH, _of_knob(name)) for name in KNOBS),
        (True, Column("steps", "steps", lambda row: f"{row.steps:,}")),
        (True, Column("live peak", "live_peak_bytes", lambda row: format_bytes(row.peak_bytes))),
        (True, Column("reserved", "reserved_peak_bytes", lambda row: format_bytes(row.reserved_peak_bytes))),
        (True, Column("headroom", "headroom", lambda row: headroom(row.headroom))),
        (True, Column("samples/s", "samples_per_s", lambda row: rate(row.speed))),
        (there(around.loss), Column("loss", "loss_at_equal_samples", lambda row: number(around.loss(row)))),
        (there(lambda row: row.foretold), Column("predicted", "predicted_live_peak_bytes", _foretold)),
        (outcomes, _words("outcome", lambda row: row.outcome)),
        (there(lambda row: row.note), _words("note", lambda row: row.note)),
    ]
    return [column for is_wanted, column in wanted if is_wanted]


SHOWN_AS = {
    "batch": "global_batch",
    "from": "came_from",
    "live peak": "live_peak_bytes",
    "loss": "loss_at_equal_samples",
    "predicted": "predicted_live_peak_bytes",
    "reserved": "reserved_peak_bytes",
    "samples/s": "samples_per_s",
}
"""Headings that are not called as the column of the frame by which they are sorted."""


def varying(rows: Sequence[Row]) -> set[str]:
    """Return the knobs that are not the same in all of these rows."""
    return {name for row in rows for name in row.settings.changed_from(rows[0].settings)}


def the_same(rows: Sequence[Row]) -> str:
    """Return what these rows have in common: knobs that the panel shows at once, and those not at their default."""
    first, differ = rows[0], varying(rows)
    parts = [first.workload] if len({row.model for row in rows}) == 1 else []
    for name, knob in KNOBS.items():
        value = getattr(first.settings, name)
        if name not in differ and (knob.in_front or value != knob.default):
            parts.append(f"{name}={knob.text(value)}")
    if len({row.ranks for row in rows}) == 1:
        parts.append(f"{first.ranks} rank{'s' * (first.ranks > 1)}")
    if len({row.on for row in rows}) == 1:
        parts.append(first.on)
    return ", ".join(filter(None, parts))


def named(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what a row's workload is called beside these rows: with the options, or the size, in which they differ.

    A ready-made workload with other options is another model under the same name.
    """
    options: dict[str, tuple[str, ...]] = {}
    by_size: dict[str, bool] = {}
    for name in {row.workload for row in rows}:
        alike = [row for row in rows if row.workload == name]
        every = [dict(row.options) for row in alike]
        there = dict.fromkeys(option for one in every for option in one)
        options[name] = tuple(option for option in there if len({one.get(option) for one in every}) > 1)
        by_size[name] = len({(row.options, row.parameters) for row in alike}) > len({row.options for row in alike})

    def name_of(row: Row) -> str:
        own = dict(row.options)
        parts = [f"{option}={own[option]:g}" for option in options.get(row.workload, ()) if option in own]
        if by_size.get(row.workload) and row.parameters is not None:
            parts.append(f"{row.parameters:,} parameters")
        return f"{row.workload}({', '.join(parts)})" if parts else row.workload

    return name_of


def batch(row: Row) -> str:
    """Micro-batch, accumulation and ranks."""
    return f"{row.settings.batch_size}×{row.settings.accumulation_steps}×{row.ranks}"


def rate(speed: Speed | None) -> str:
    """Samples/s, and half of what lies between the quarters of steps as a share of it."""
    if speed is None:
        return "n/a"
    if speed.steps < 2 or not speed.median:
        return format_rate(speed.median)
    return f"{format_rate(speed.median)} ± {100 * (speed.high - speed.low) / 2 / speed.median:.0f} %"


def number(value: float | None) -> str:
    """Of a loss."""
    return "n/a" if value is None or math.isnan(value) else f"{value:.4g}"


def headroom(share: float | None) -> str:
    """In per cent."""
    return "n/a" if share is None else f"{100 * share:.0f} %".replace("-", "−")


def _foretold(row: Row) -> str:
    """Return the peak that was predicted, by how much it was too high, and the predicted samples/s."""
    if row.foretold is None:
        return "n/a"
    said, off, speed = row.foretold, row.foretold.error, row.foretold.samples_per_s
    error = "" if off is None else f" ({round(100 * off, 1) or 0:+.1f} %)".replace("-", "−")
    return said.live_peak + error + ("" if speed is None else f"\n{format_rate(speed)}/s")


def _of_knob(name: str) -> Column:
    knob = KNOBS[name]
    return Column(name, name, lambda row: knob.text(getattr(row.settings, name)), of_words=bool(knob.choices))


def _words(heading: str, text: Callable[[Row], str]) -> Column:
    return Column(heading, "", text, of_words=True)


SCROLLED = "<div style='overflow-x: auto'>"  # where it is wider than the notebook
# Runs where notebooks are trusted, and in a page of one's own. Where scripts are taken out the table stands by itself:
# it is this script that makes headings buttons. The only text in it is numbers.
_SCRIPT = files(__package__).joinpath("sortable.js").read_text(encoding="utf-8")


def ranks(values: Sequence[Any]) -> list[int | None]:
    """Return the place of each value among the different ones: numbers before words; none for what is not known."""
    keys = [None if value in (None, "") or value != value else _key(value) for value in values]
    places = {key: place for place, key in enumerate(sorted({key for key in keys if key is not None}))}
    return [None if key is None else places[key] for key in keys]


def order(values: Sequence[Any], highest_first: bool = False) -> list[int]:
    """Return the places of these values from the lowest to the highest; what is not known comes at the end."""
    sign = -1 if highest_first else 1
    keyed = [(rank is None, sign * (rank or 0), place) for place, rank in enumerate(ranks(values))]
    return [place for _, _, place in sorted(keyed)]


def latest(rows: Sequence[Row], most: int) -> list[Row]:
    """Those that began last and that of now, in the same order; a file's may be older than their numbers."""
    last = sorted(rows, key=lambda row: (row.present, row.began_s))[-most:]
    kept = {row.key for row in last}
    return [row for row in rows if row.key in kept]


def sortable(table: Table, values: Sequence[Sequence[Any]]) -> str:
    """Return the table for a notebook, whose headings sort it; ``values`` has a column of them for each."""
    places = json.dumps([ranks(column) for column in values])
    return f"{SCROLLED}{table.html(scrolls=True)}<script>{_SCRIPT.replace('PLACES', places)}</script></div>"


def _key(value: Any) -> tuple[bool, float, str]:
    return (False, float(value), "") if isinstance(value, (bool, int, float)) else (True, 0.0, str(value))
