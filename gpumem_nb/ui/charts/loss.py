"""The loss of each step, as the mean of all ranks, and that on the validation data where it was evaluated."""

from __future__ import annotations

from plotly import graph_objects as go

from ..series import MOST_POINTS
from ..style import BLUE, GREY
from .chart import Axes, Chart, Drawn, Place
from .view import View


def _draw(view: View, _: Axes) -> Drawn:
    trained = (view.series.step, view.series.mean_of_ranks(lambda sample: sample.loss))
    validated = [(evaluation.step, evaluation.loss) for evaluation in view.evaluations][-MOST_POINTS:]
    return Drawn([trained, ([step for step, _ in validated], [loss for _, loss in validated])])


LOSS = Chart(
    title=lambda view: "Mean loss, validation (dots)" if view.evaluations else "Loss, mean of ranks",
    place=Place(row=1, column=1),
    traces=lambda view, axes: [
        go.Scatter(name="loss", mode="lines", line={"color": GREY, "width": 3}, showlegend=False),
        go.Scatter(
            name="validation",
            mode="lines+markers",
            line={"color": BLUE, "width": 2, "dash": "dot"},
            marker={"size": 8},
            showlegend=False,
            hovertemplate="validation after step %{x}: %{y:.4g}",
        ),
    ],
    draw=_draw,
)
