"""The peak of each step: bands of the worst rank's categories, and the highest and lowest rank's as lines."""

from __future__ import annotations

from typing import Any

from plotly import graph_objects as go

from ..style import GREY, LOOKS, VERMILION
from .chart import Axes, Chart, Drawn, Place, straight_line
from .view import View


def _title(view: View) -> str:
    return f"Peak of each step, {view.unit}, rank {view.worst.rank if view.worst else 0}"


def _traces(view: View, _: Axes) -> list[Any]:
    # The categories of a recorded step hold until the next recorded one.
    bands = [
        go.Scatter(
            name=name,
            stackgroup="peak",
            mode="lines",
            line={"shape": "hv", "width": 0, "color": look.colour},
            fillcolor=look.colour,
            fillpattern=look.filling if look.pattern else None,
            hovertemplate="step %{x}: %{y:.1f}",
        )
        for name, look in LOOKS.items()
    ]
    # Thin, and distinguished by their dashes only: the colours are those of the categories.
    lines = [
        go.Scatter(
            name=name,
            mode="lines",
            line={"color": GREY, "dash": dash, "width": 1.5, "shape": "hv"},
            hovertemplate="step %{x}: %{y:.1f}",
        )
        for name, dash in (("highest rank", "solid"), ("lowest rank", "dot"))
    ]
    too_high = go.Scatter(
        name="out of memory",
        mode="markers",
        marker={"symbol": "x", "size": 11, "color": VERMILION, "line": {"width": 1, "color": "white"}},
        hovertemplate="step %{x}: needed at least %{y:.1f}",
    )
    return [*bands, *lines, too_high]


def _draw(view: View, axes: Axes) -> Drawn:
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
    return Drawn([*bands, *lines, attempts], view.memory_range, shapes=limits, annotations=notes)


PEAK_OF_STEPS = Chart(
    title=_title,
    place=Place(row=0, column=1, span=2),
    traces=_traces,
    draw=_draw,
    names_marks=True,
    theme_lines=True,
)
