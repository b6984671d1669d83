"""The loss of each step, as the mean of all ranks, and that on the validation data where it was evaluated.

Thin lines are the learning rate, where it changes, and the scale of fp16's loss; hovering tells their values.
"""

from __future__ import annotations

import numpy as np
from plotly import graph_objects as go

from ..series import MOST_POINTS, Array
from ..style import BLUE, GREEN, GREY, ORANGE
from .chart import Axes, Chart, Drawn, Place
from .view import View


def _draw(view: View, _: Axes) -> Drawn:
    loss = view.series.mean_of_ranks(lambda sample: sample.loss)
    validated = [(evaluation.step, evaluation.loss) for evaluation in view.evaluations][-MOST_POINTS:]
    trained = (view.series.step, view.shown(loss))
    dots = ([step for step, _ in validated], [loss for _, loss in validated])
    thin = [(view.series.step[: line.size], line) for line in (_rate(view), _scale(view))]
    return Drawn([trained, dots, *thin], y_type="log" if view.choice.log_loss else "linear")


def _rate(view: View) -> Array:
    """Return the learning rate, if it is not the same in all that is drawn: the knob says that."""
    rate = view.series.mean_of_ranks(lambda sample: sample.learning_rate)
    known = rate[np.isfinite(rate)]
    return rate if known.size and np.ptp(known) > 0 else rate[:0]


def _scale(view: View) -> Array:
    scale = view.series.mean_of_ranks(lambda sample: sample.loss_scale)
    return scale if np.isfinite(scale).any() else scale[:0]


def _title(view: View) -> str:
    seen = {"dots: validation": bool(view.evaluations), "thin: learning rate": _rate(view).size > 0}
    if seen["dots: validation"] and seen["thin: learning rate"]:  # as long as a title can be on a narrow panel
        return "Loss (dots: validation, thin: learning rate)"
    return "Loss, mean of ranks" + "".join(f" ({what})" for what, there in seen.items() if there)


def _thin(name: str, colour: str, axis: str) -> go.Scatter:
    line = {"color": colour, "width": 1}
    return go.Scatter(name=name, mode="lines", line=line, yaxis=axis, hovertemplate=name + " at step %{x}: %{y:.4g}")


LOSS = Chart(
    title=_title,
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
        _thin("learning rate", GREEN, axes.unseen_y[0]),
        _thin("loss scale", ORANGE, axes.unseen_y[1]),
    ],
    draw=_draw,
    unseen_y=2,
)
