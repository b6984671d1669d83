"""The seconds of a step's parts, as bands over steps: the mean of all ranks, thinned out."""

from __future__ import annotations

from plotly import graph_objects as go

from ...shared.step_times import PARTS, UNKNOWN
from ..style import TIME_COLOURS
from .chart import Axes, Chart, Drawn, Place
from .view import View


def _draw(view: View, _: Axes) -> Drawn:
    bands = view.series.means_of_ranks(lambda sample: (sample.times or UNKNOWN).seconds)
    if not bands.size:
        return Drawn([([], []) for _ in PARTS])
    return Drawn([(view.series.step, view.shown(1000 * band)) for band in bands])


STEP_TIME = Chart(
    title=lambda view: "Step time, ms",
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
