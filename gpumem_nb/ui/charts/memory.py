"""Charts of memory: each rank's VRAM at its latest known peak, and the peak of each step.

Of the first other readings stand around and across the stack; in the second there are bands of the worst rank's
categories, and the highest and lowest rank's peaks as lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from ...shared.categories import CATEGORIES
from ...shared.units import format_bytes
from ..series import MOST_RANKS, Array, Peak, shown, worst_first
from ..style import GREY, LOOKS, UNKNOWN, VERMILION
from .chart import Axes, Chart, Drawn, Label, Place, beside, largest_parts, straight_line
from .view import View

_READINGS = ("live_bytes", "device_used_bytes", "limit_bytes")  # in the order of their traces, after reserved bytes


def _vram_traces(view: View, axes: Axes) -> list[Any]:
    """Return the categories' shares of the ranks' peaks, peaks that were not recorded, and other readings."""
    looks = LOOKS | {"categories not known yet": UNKNOWN}
    stacks = [
        go.Bar(
            name=name,
            width=0.5,
            marker={"color": look.colour, "line": {"width": 0}, "pattern": look.filling if look.pattern else None},
            hovertemplate="%{y:.1f}",
        )
        for name, look in looks.items()
    ]
    common = {"hovertemplate": "%{y:.1f}"}
    across = {"symbol": "line-ew", "size": 30}
    spot = {"symbol": "circle", "size": 9, "color": "white", "line": {"width": 2, "color": "black"}}
    limit, device = across | {"line": {"width": 4, "color": VERMILION}}, across | {"line": {"width": 4, "color": GREY}}
    outline = {"color": "rgba(0,0,0,0)", "line": {"width": 2, "color": GREY}}
    real = not view.virtual  # only of a real GPU more is in use than its allocator has reserved
    return [
        *stacks,
        go.Bar(name="reserved", width=0.7, marker=outline, yaxis=axes.second_y, **common),
        go.Scatter(name="live now", mode="markers", marker=spot, **common),
        go.Scatter(name="device", mode="markers", marker=device, visible=real, **common),
        go.Scatter(name="limit", mode="markers", marker=limit, **common),
    ]


def _draw_vram(view: View, axes: Axes) -> Drawn:
    bars = shown(view.peaks)
    stacks = [[_part(peak, name) for peak in bars.values()] for name in (*CATEGORIES, None)]
    reserved: list[int | None] = [peak.reserved for peak in bars.values()]
    truths = [[getattr(view.readings[peak.rank], name, None) for peak in bars.values()] for name in _READINGS]
    lines: list[list[int | None]] = [*stacks, reserved, *truths]
    points = [(list(bars), _scaled(of_ranks, view.unit_bytes)) for of_ranks in lines]
    return Drawn(points, view.memory_range, annotations=[*_far_limits(view, axes), *_numbers(bars, view, axes)])


_MOST_NUMBERS = 3  # in a narrow panel, more of them would cover each other


def _numbers(bars: Mapping[str, Peak], view: View, axes: Axes) -> list[dict[str, Any]]:
    """Return each rank's peak as a number over its bar; of many ranks, the worst one's alone."""
    worst = worst_first(list(bars.values()))[:1]
    return [
        {
            "text": _number(peak.bytes / view.unit_bytes),
            "x": name,
            "y": max(peak.bytes, peak.reserved) / view.unit_bytes,
        }
        | {"xref": axes.x, "yref": axes.y, "yanchor": "bottom", "showarrow": False}
        for name, peak in bars.items()
        if len(bars) <= _MOST_NUMBERS or peak in worst
    ]


def _number(value: float) -> str:
    """Return a size with three digits, and with as many as it has before the point."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _part(peak: Peak, category: str | None) -> int | None:
    """Return what a category takes of a peak; ``None`` stands for all of one that was not recorded."""
    if category is None:
        return None if peak.ledger else peak.bytes
    # Nothing is 0 here: a gap would make plotly begin the stack anew above it.
    return peak.ledger.at_peak.get(category, 0) if peak.ledger else None


def _scaled(values: Sequence[int | None], unit_bytes: int) -> Array:
    return np.array([math.nan if value is None else value / unit_bytes for value in values])


def _far_limits(view: View, axes: Axes) -> list[dict[str, Any]]:
    """Limits far above everything drawn, named over the bars."""
    text = "<br>".join(map(format_bytes, view.limits_out_of_sight))
    place = {"showarrow": False, "x": 1, "y": 1, "xanchor": "right", "yanchor": "top"}
    words = f"limit ↑<br>{text}<br>off this chart"
    return [{"text": words, "xref": f"{axes.x} domain", "yref": f"{axes.y} domain", **place}] if text else []


def _vram_title(view: View) -> str:
    # There is no room for these words under the bars.
    return "Now, by rank" if len(view.peaks) <= MOST_RANKS else "Worst, median, best"


VRAM = Chart(
    title=_vram_title,
    place=Place(row=0, column=0),
    traces=_vram_traces,
    draw=_draw_vram,
    over_steps=False,
    second_y=True,
)


def _peak_title(view: View) -> str:
    # Memory that is accounted, not a GPU's, says so.
    virtual = " (virtual)" if view.virtual else ""
    return f"Peak of each step, {view.unit}{virtual}, rank {view.worst.rank if view.worst else 0}"


def _peak_traces(view: View, _: Axes) -> list[Any]:
    # The categories of a recorded step hold until the next recorded one.
    bands = [
        go.Scatter(
            name=name,
            stackgroup="peak",
            mode="lines",
            line={"shape": "hv", "width": 0, "color": look.colour},
            fillcolor=look.colour,
            fillpattern=look.filling if look.pattern else None,
            hovertemplate="%{y:.1f}",
        )
        for name, look in LOOKS.items()
    ]
    # Thin, and distinguished by their dashes only: the colours are those of the categories.
    lines = [
        go.Scatter(
            name=name,
            mode="lines",
            line={"color": GREY, "dash": dash, "width": 1.5, "shape": "hv"},
            hovertemplate="%{y:.1f}",
        )
        for name, dash in (("highest rank", "solid"), ("lowest rank", "dot"))
    ]
    too_high = go.Scatter(
        name="out of memory",
        mode="markers",
        marker={"symbol": "x", "size": 11, "color": VERMILION, "line": {"width": 1, "color": "white"}},
        hovertemplate="needed at least %{y:.1f}",
    )
    return [*bands, *lines, too_high]


def _draw_peaks(view: View, axes: Axes) -> Drawn:
    bands = [(view.bands.step, band) for band in view.bands.live / view.unit_bytes]
    lines = [(view.series.step, line / view.unit_bytes) for line in (view.highest_peaks, view.lowest_peaks)]
    attempts = ([one.step for one in view.attempts], [one.bytes / view.unit_bytes for one in view.attempts])
    # In the bars' chart each bar has its own limit.
    limits = [
        straight_line(f"{axes.x} domain", (0, 1), axes.y, (limit / view.unit_bytes,) * 2, VERMILION, "solid", 3)
        for limit in view.limits
    ]
    nothing = {"xref": f"{axes.x} domain", "yref": f"{axes.y} domain", "x": 0.5, "y": 0.5, "showarrow": False}
    notes = [] if view.has_steps else [{"text": "no step yet", **nothing}]
    names = beside(_names(view), axes, view.memory_range, PEAK_OF_STEPS.height_px)
    return Drawn([*bands, *lines, attempts], view.memory_range, shapes=limits, annotations=[*notes, *names])


_WORTH_A_NAME = 0.001  # of the stack: less cannot be seen


def _names(view: View) -> list[Label]:
    """Return the names of the largest categories of the latest step, and that of the limits, with their sizes."""
    limits = [
        Label(f"limit {limit / view.unit_bytes:.4g}", limit / view.unit_bytes, VERMILION) for limit in view.limits
    ]
    if not view.bands.step.size:
        return limits
    latest = view.bands.live[:, -1] / view.unit_bytes
    words = [f"{name} {_number(size)}" for name, size in zip(CATEGORIES, latest, strict=True)]
    colours = [LOOKS[name].colour for name in CATEGORIES]
    return limits + largest_parts(latest, latest.tolist(), words, colours, _WORTH_A_NAME * float(latest.sum()))


PEAK_OF_STEPS = Chart(
    title=_peak_title,
    place=Place(row=0, column=1, span=2),
    traces=_peak_traces,
    draw=_draw_peaks,
    names_marks=True,
    theme_lines=True,
)
