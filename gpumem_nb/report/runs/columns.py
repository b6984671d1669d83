"""The columns of the table of runs: what is the same in all rows is told below it, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...shared.knobs import KNOBS
from ...shared.units import format_bytes, format_rate
from ..speed import Speed
from .models import named
from .row import Row

Value = float | str | None
_OF_BATCH = ("batch_size", "accumulation_steps")
BEST, NOW = "best", "now"
LOSS_WINDOW = 0.25  # of the samples that are compared: a single step's loss jumps


@dataclass(frozen=True, slots=True)
class Column:
    """What a column says of a row: in words, and as the value by which rows are sorted."""

    heading: str
    cell: Callable[[Row], str]
    value: Callable[[Row], Value]
    of_words: bool = False


@dataclass(frozen=True)
class Around:
    """What can be said of a row only beside the others.

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
        samples: dict[tuple[object, ...], int] = {}
        judged = [row for row in rows if row.comparable and len(row.curve)]
        went_well = {row.model for row in judged if not row.failed}
        for row in judged:
            if not row.failed or row.model not in went_well:
                samples[row.model] = min(row.samples, samples.get(row.model, row.samples))
        for row in rows:
            if not row.comparable:
                continue
            alike = (row.model, row.ranks, row.device)
            if not row.failed and (row.samples_per_s or 0) > (
                (fastest[alike].samples_per_s or 0) if alike in fastest else 0
            ):
                fastest[alike] = row
        losses = {row.key: loss_after(row, samples[row.model]) for row in judged}
        known = {key: loss for key, loss in losses.items() if loss is not None}
        return cls(frozenset(row.key for row in fastest.values()), samples, known)

    def loss(self, row: Row) -> float | None:
        """The row's loss after as many samples as all rows of its model have seen, see :func:`loss_after`."""
        return self.losses.get(row.key)

    def mark(self, row: Row) -> str:
        """Whether it is the best, or the one of now."""
        return ", ".join(word for word, is_so in ((BEST, row.key in self.best), (NOW, row.present)) if is_so)


def loss_after(row: Row, samples: int) -> float | None:
    """The mean loss over the last quarter of the first ``samples`` samples that all ranks saw since the flip."""
    return row.curve.mean_loss((1 - LOSS_WINDOW) * samples, samples)


def columns(rows: Sequence[Row], around: Around) -> list[Column]:
    """Those that tell rows apart, and the figures."""

    def varies(value: Callable[[Row], object]) -> bool:
        return len({value(row) for row in rows}) > 1

    def there(value: Callable[[Row], object]) -> bool:
        return any(value(row) not in (None, "") for row in rows)

    found = [Column("run", lambda row: str(row.number), lambda row: row.number)]
    if there(around.mark):
        found.append(_words("mark", around.mark))
    if there(lambda row: row.came_from):
        found.append(_words("from", lambda row: row.came_from))
    if varies(lambda row: row.model):
        found.append(_words("workload", named(rows)))
    if varies(lambda row: row.on):
        found.append(_words("device", lambda row: row.on))
    differ = varying(rows)
    if varies(lambda row: row.ranks) or differ & set(_OF_BATCH):
        found.append(Column("batch", batch, lambda row: row.global_batch))
    found += [_of_knob(name) for name in KNOBS if name in differ and name not in _OF_BATCH]
    found += _figures(around, there)
    if varies(lambda row: row.outcome) or any(row.failed for row in rows):
        found.append(_words("outcome", lambda row: row.outcome))
    if there(lambda row: row.note):
        found.append(_words("note", lambda row: row.note))
    return found


def varying(rows: Sequence[Row]) -> set[str]:
    """The knobs that are not the same in all of these rows."""
    return {name for row in rows for name in row.settings.changed_from(rows[0].settings)}


def the_same(rows: Sequence[Row]) -> str:
    """What is the same in all of these rows: the knobs that the panel shows at once, and those not at their default."""
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


def _figures(around: Around, there: Callable[[Callable[[Row], object]], bool]) -> list[Column]:
    figures = [
        Column("steps", lambda row: f"{row.steps:,}", lambda row: row.steps),
        Column("live peak", lambda row: format_bytes(row.peak_bytes), lambda row: row.peak_bytes),
        Column("reserved", lambda row: format_bytes(row.reserved_peak_bytes), lambda row: row.reserved_peak_bytes),
        Column("headroom", lambda row: headroom(row.headroom), lambda row: row.headroom),
        Column("samples/s", lambda row: rate(row.speed), lambda row: row.samples_per_s),
    ]
    if there(around.loss):
        figures.append(Column("loss", lambda row: number(around.loss(row)), around.loss))
    if there(lambda row: row.foretold):
        live = Column("predicted", _foretold, lambda row: row.foretold.live_peak_bytes if row.foretold else None)
        figures.append(live)
    return figures


def _foretold(row: Row) -> str:
    """The peak that was predicted, by how much it was too high, and the predicted samples/s."""
    if row.foretold is None:
        return "n/a"
    said, off, speed = row.foretold, row.foretold.error, row.foretold.samples_per_s
    live = format_bytes(said.live_peak_bytes)
    error = "" if off is None else f" ({round(100 * off, 1) or 0:+.1f} %)".replace("-", "−")
    return live + error + ("" if speed is None else f"\n{format_rate(speed)}/s")


def _of_knob(name: str) -> Column:
    knob = KNOBS[name]

    def value(row: Row) -> Value:
        found = getattr(row.settings, name)
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else knob.text(found)

    return Column(name, lambda row: knob.text(getattr(row.settings, name)), value, of_words=bool(knob.choices))


def _words(heading: str, text: Callable[[Row], str]) -> Column:
    return Column(heading, text, text, of_words=True)
