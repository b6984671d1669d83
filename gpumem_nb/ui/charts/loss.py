"""The loss of each step, as the mean of all ranks."""

from __future__ import annotations

from plotly import graph_objects as go

from ..style import GREY
from .chart import Axes, Chart, Drawn, Place
from .view import View


def _draw(view: View, _: Axes) -> Drawn:
    return Drawn([(view.series.step, view.series.mean_of_ranks(lambda sample: sample.loss))])


LOSS = Chart(
    title=lambda view: "Loss, mean of ranks",
    place=Place(row=1, column=1),
    traces=lambda view, axes: [
        go.Scatter(name="loss", mode="lines", line={"color": GREY, "width": 3}, showlegend=False)
    ],
    draw=_draw,
)
