"""The categories of each rank's VRAM at its latest known peak; other readings around and across the stack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from ...shared.categories import CATEGORIES
from ...shared.units import format_bytes
from ..series import Array, Peak, shown
from ..style import GREY, LOOKS, UNKNOWN, VERMILION
from .chart import Axes, Chart, Drawn, Place
from .view import View

_READINGS = ("live_bytes", "device_used_bytes", "limit_bytes")  # in the order of their traces, after reserved bytes


def _title(view: View) -> str:
    # Memory that is accounted, not a GPU's, says so.
    return f"VRAM peak, {view.unit}{' (virtual)' if view.virtual else ''}"


def _traces(view: View, axes: Axes) -> list[Any]:
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


def _draw(view: View, axes: Axes) -> Drawn:
    bars = shown(view.peaks)
    stacks = [[_part(peak, name) for peak in bars.values()] for name in (*CATEGORIES, None)]
    reserved: list[int | None] = [peak.reserved for peak in bars.values()]
    truths = [[getattr(view.readings[peak.rank], name, None) for peak in bars.values()] for name in _READINGS]
    lines: list[list[int | None]] = [*stacks, reserved, *truths]
    points = [(list(bars), _scaled(of_ranks, view.unit_bytes)) for of_ranks in lines]
    return Drawn(points, view.memory_range, annotations=_far_limits(view, axes))


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
    text = "<br>".join(
        f"{format_bytes(limit)}<br>(drawn to {view.top / limit:.0%})" for limit in view.limits_out_of_sight
    )
    place = {"showarrow": False, "x": 1, "y": 1, "xanchor": "right", "yanchor": "top"}
    note = {"text": f"limit ↑ {text}", "xref": f"{axes.x} domain", "yref": f"{axes.y} domain", **place}
    return [note] if text else []


VRAM = Chart(
    title=_title,
    place=Place(row=0, column=0, rows=2),
    traces=_traces,
    draw=_draw,
    over_steps=False,
    second_y=True,
)
