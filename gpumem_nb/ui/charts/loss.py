"""The loss of each step, as the mean of all ranks, and that on the validation data where it was evaluated."""

from __future__ import annotations

from plotly import graph_objects as go

from ..series import MOST_POINTS
from ..style import BLUE, GREY
from .chart import Axes, Chart, Drawn, Place
from .view import View


def _draw(view: View, _: Axes) -> Drawn:
    loss = view.series.mean_of_ranks(lambda sample: sample.loss)
    validated = [(evaluation.step, evaluation.loss) for evaluation in view.evaluations][-MOST_POINTS:]
    trained = (view.series.step, view.shown(loss))
    dots = ([step for step, _ in validated], [loss for _, loss in validated])
    return Drawn([trained, dots], y_type="log" if view.choice.log_loss else "linear")


LOSS = Chart(
    title=lambda view: "Loss, mean of ranks" + (" (dots: validation)" if view.evaluations else ""),
    place=Place(row=2, column=1, span=2),
    traces=lambda view, axes: [
        go.Scatter(name="loss", mode="lines", line={"color": GREY, "width": 2}, hovertemplate="step %{x}: %{y:.4g}"),
        go.Scatter(
            name="validation",
            mode="lines+markers",
            line={"color": BLUE, "width": 2, "dash": "dot"},
            marker={"size": 7},
            hovertemplate="validation after step %{x}: %{y:.4g}",
        ),
    ],
    draw=_draw,
)
