"""The key to a report's stacked charts with the worst rank's numbers, and a strip of all ranks where there are many."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..report.breakdown import share
from ..report.step_time import TimeReport
from ..shared.categories import CATEGORIES, MEANING
from ..shared.step_times import MEANING as MEANING_OF_PARTS
from ..shared.step_times import PARTS
from ..shared.units import format_bytes
from .series import MOST_RANKS, Peak, above_median
from .style import HEAT, LOOKS, TIME_COLOURS, UNKNOWN, mixed

# What else the bars show.
_SIGNS = (
    "<li><i class='gpumem-limit'></i>limit</li>",
    "<li><i class='gpumem-live'></i>live now</li>",
    "<li><i class='gpumem-reserved'></i>reserved</li>",
)
_SHOWS = 0.005  # of a step: less would be 0 %
_WAITING = " title='waiting for data, for averaged gradients, for ranks that are slower'"
_DARK_UP_TO = 0.45  # of the limit; white is readable on these colours, black on the others


def key(worst: Peak | None, time: TimeReport | None) -> str:
    """Every category in stacking order from the top, with its part of the worst rank's peak; then a step's parts."""
    ledger = worst.ledger if worst else None
    items = [*_SIGNS, "<li class='gpumem-of'>Memory at the peak:</li>"]
    for name in reversed(CATEGORIES):
        size = ledger.at_peak.get(name, 0) if ledger else None
        number = f"<b>{share(size, ledger.peak_bytes)}</b> {format_bytes(size)}" if ledger and size is not None else ""
        faint = " class='gpumem-none'" if size == 0 else ""
        items.append(
            f"<li{faint} title='{escape(MEANING[name], quote=True)}'><i style='background: {LOOKS[name].css}'></i>"
            f"{escape(name)} {number}</li>"
        )
    if ledger is None:
        items.append(f"<li><i style='background: {UNKNOWN.css}'></i>not recorded yet</li>")
    return f"<ul class='gpumem-key'>{''.join([*items, *_parts(time)])}</ul>"


def _parts(time: TimeReport | None) -> list[str]:
    """Every part of a step's time that shows, in stacking order from the top, below how much of it is waiting."""
    waiting = f", {100 * time.waiting:.0f} % of it waiting for others" if time else ""
    items = [f"<li class='gpumem-of'{_WAITING if time else ''}>A step's time{waiting}:</li>"]
    for part in reversed(PARTS):
        share = time.share(part) if time else 1.0
        if share >= _SHOWS:
            number = f"<b>{100 * share:.0f} %</b>" if time else ""
            items.append(
                f"<li title='{escape(MEANING_OF_PARTS[part], quote=True)}'>"
                f"<i style='background: {TIME_COLOURS[part]}'></i>{part} {number}</li>"
            )
    return items


def strip(found: Sequence[Peak]) -> str:
    """Return a cell per rank, coloured by its peak as share of the limit; ranks that stand out have a frame."""
    if len(found) <= MOST_RANKS:
        return ""
    top = max(peak.bytes for peak in found) or 1
    of_limit = all(peak.limit for peak in found)
    cells = "".join(
        _cell(peak, peak.share if of_limit else peak.bytes / top, above_median(peak, found) > 0) for peak in found
    )
    what = "the limit" if of_limit else "the highest, limit n/a"
    label = f"All {len(found)} ranks: peak as share of {what}, from dark to bright"
    return f"<div class='gpumem-strip' role='img' aria-label='{label}'><span>{label}</span><div>{cells}</div></div>"


def _cell(peak: Peak, heat: float, higher: bool) -> str:
    text = f"rank {peak.rank}: {format_bytes(peak.bytes)}, {heat * 100:.0f} %"
    ink = "#fff" if heat <= _DARK_UP_TO else "#000"
    frame = " class='gpumem-higher'" if higher else ""
    return f"<i{frame} title='{text}' style='background: {mixed(HEAT, heat)}; color: {ink}'>{peak.rank}</i>"
