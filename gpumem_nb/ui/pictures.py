"""Static pictures: a bar of peak memory for each configuration tried, and reserved memory against the batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from ..report.differences import short
from ..report.runs import Row
from ..report.runs.columns import latest, named
from ..shared.messages import Reading
from ..shared.units import format_bytes, format_rate
from .style import BLUE, TEXT, VERMILION

MOST_BARS = 16
_ROW, _LABEL, _BARS, _WORDS = 24, 250, 320, 190  # pixels: height of a row, widths of the three columns
_LETTER = 7.5  # pixels, about
_TOP = 22  # pixels above the first row
_FONT = f"font-family='sans-serif' font-size='13' fill='{TEXT}'"


def picture(rows: Sequence[Row], limit_bytes: int | None, device: str) -> str:
    """SVG with the latest configurations from top to bottom; the limit is drawn where all bars leave room for it.

    Args:
        rows: what was tried.
        limit_bytes: of every rank; ``None`` where there is none, or ranks have different ones.
        device: whose limit that is: runs of another one have none.
    """
    shown = latest(rows, MOST_BARS)
    top = max((one.peak_bytes or 0 for one in shown), default=0) or 1
    name_of = named(shown)
    places = [place for place, one in enumerate(shown) if one.device == device]
    limited = limit_bytes if limit_bytes and limit_bytes < 3 * top and places else 0
    scale = _BARS / max(top, limited)
    limit_x = _LABEL + limited * scale if limited else None
    bars = "".join(_row(place, one, shown[:place], scale, name_of, limit_x) for place, one in enumerate(shown))
    width, height = _LABEL + _BARS + _WORDS, _ROW * len(shown) + 26
    limit = _limit(limited, limit_x, places) if limit_x else ""
    title = "live peak of the worst rank"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        f"style='max-width: 100%; min-width: 480px; height: auto' role='img' "
        f"aria-label='{title}'><text x='0' y='14' {_FONT}>{title}</text>{limit}{bars}</svg>"
    )


def common_limit(readings: Sequence[Reading | None]) -> int | None:
    """Return the limit that all ranks have; ``None`` if they differ: a rank's limit is not another's."""
    limits = {reading.limit_bytes for reading in readings if reading}
    return limits.pop() if len(limits) == 1 else None


def _row(
    place: int,
    one: Row,
    before: Sequence[Row],
    scale: float,
    name_of: Callable[[Row], str],
    limit_x: float | None,
) -> str:
    y = _TOP + _ROW * place
    earlier = next((other for other in reversed(before) if other.model == one.model), None)
    name = f"{one.number}: {(earlier and short(earlier.settings, one.settings)) or name_of(one)}"
    width = (one.peak_bytes or 0) * scale
    colour = BLUE if one.outcome == "ok" else VERMILION
    measured = f"{format_bytes(one.peak_bytes)}, {format_rate(one.samples_per_s)} samples/s"
    words = measured if one.outcome == "ok" else {"oom": "out of memory"}.get(one.outcome, one.outcome)
    x = _LABEL + width + 6
    if limit_x and x < limit_x < x + _LETTER * len(words):
        x = limit_x + 6  # the limit's line would go through them
    return (
        f"<text x='{_LABEL - 8}' y='{y + 15}' text-anchor='end' {_FONT}>{escape(name[:36])}</text>"
        f"<rect x='{_LABEL}' y='{y + 3}' width='{width:.1f}' height='{_ROW - 8}' fill='{colour}'/>"
        f"<text x='{x:.1f}' y='{y + 15}' {_FONT}>{escape(words)}</text>"
    )


def _limit(limit_bytes: int, x: float, places: Sequence[int]) -> str:
    lines = "".join(
        f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP + _ROW * place}' y2='{_TOP + _ROW * (place + 1)}' "
        f"stroke='{VERMILION}' stroke-width='2'/>"
        for place in places
    )
    return f"{lines}<text x='{x + 4:.1f}' y='14' {_FONT}>limit {format_bytes(limit_bytes)}</text>"
