"""What the parts of a step take, as bands over steps: the mean of all ranks, thinned out."""

from __future__ import annotations

from functools import partial

from plotly import graph_objects as go

from ...shared.messages import Sample
from ...shared.step_times import PARTS
from ..style import TIME_COLOURS
from .chart import Axes, Chart, Drawn, Place
from .view import View


def _title(view: View) -> str:
    waits = f", waits {100 * view.time.waiting:.0f} %" if view.time else ""
    return f"Step time, ms{waits}"


def _draw(view: View, _: Axes) -> Drawn:
    bands = [view.series.mean_of_ranks(partial(_milliseconds, part)) for part in PARTS]
    return Drawn([(view.series.step, view.shown(band)) for band in bands])


def _milliseconds(part: str, sample: Sample) -> float | None:
    return 1000 * sample.times[part] if sample.times else None


STEP_TIME = Chart(
    title=_title,
    place=Place(row=2, column=0),
    traces=lambda view, axes: [
        go.Scatter(
            name=part,
            stackgroup="time",
            mode="lines",
            line={"width": 0, "color": TIME_COLOURS[part]},
            fillcolor=TIME_COLOURS[part],
            hovertemplate="step %{x}: %{y:.1f} ms",
        )
        for part in PARTS
    ],
    draw=_draw,
)
