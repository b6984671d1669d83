"""Charts of what each step did: loss, samples/s, and the time of its parts.

In that of the loss thin lines are the learning rate, where it changes, and the scale of fp16's loss; hovering tells
their values.
"""

from __future__ import annotations

import numpy as np
from plotly import graph_objects as go

from ...shared.step_times import PARTS, UNKNOWN
from ..series import MOST_POINTS, Array
from ..style import BLUE, GREEN, GREY, ORANGE, SKY, TIME_COLOURS
from .chart import Axes, Chart, Drawn, Place
from .view import View


def _draw_loss(view: View, _: Axes) -> Drawn:
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


def _loss_title(view: View) -> str:
    seen = {"dots: validation": bool(view.evaluations), "thin: learning rate": _rate(view).size > 0}
    if seen["dots: validation"] and seen["thin: learning rate"]:  # as long as a title can be on a narrow panel
        return "Loss (dots: validation, thin: learning rate)"
    return "Loss, mean of ranks" + "".join(f" ({what})" for what, there in seen.items() if there)


def _thin(name: str, colour: str, axis: str) -> go.Scatter:
    line = {"color": colour, "width": 1}
    return go.Scatter(name=name, mode="lines", line=line, yaxis=axis, hovertemplate=name + " at step %{x}: %{y:.4g}")


LOSS = Chart(
    title=_loss_title,
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
    draw=_draw_loss,
    unseen_y=2,
)


def _draw_speed(view: View, _: Axes) -> Drawn:
    speed = view.series.sum_of_ranks(lambda sample: sample.samples_per_s)
    return Drawn([(view.series.step, view.shown(speed))])


def _speed_title(view: View) -> str:
    if view.time and (late := view.time.straggler):  # short: it stands on two thirds of a narrow panel
        return f"Samples/s (others wait {100 * late.share:.0f} % for rank {late.rank})"
    return "Samples/s, all ranks"


SPEED = Chart(
    title=_speed_title,
    place=Place(row=1, column=1, span=2),
    traces=lambda view, axes: [
        go.Scatter(
            name="samples/s", mode="lines", line={"color": SKY, "width": 2}, hovertemplate="step %{x}: %{y:,.2~f}"
        )
    ],
    draw=_draw_speed,
)


def _draw_times(view: View, _: Axes) -> Drawn:
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
    draw=_draw_times,
)
