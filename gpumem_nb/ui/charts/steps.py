"""Charts of what each step did: loss, samples/s, and the time of its parts.

In that of the loss thin lines are the learning rate, where it changes, and the scale of fp16's loss; hovering tells
their values. What is seen is named beside the title, in its colour.
"""

from __future__ import annotations

import numpy as np
from plotly import graph_objects as go

from ...shared.step_times import PARTS, UNKNOWN
from ..series import MOST_POINTS, Array
from ..style import BLUE, GREEN, GREY, ORANGE, SKY, TIME_COLOURS
from .chart import Axes, Chart, Drawn, Label, Place, beside, largest_parts
from .view import View


def _draw_loss(view: View, _: Axes) -> Drawn:
    loss = view.series.mean_of_ranks(lambda sample: sample.loss)
    validated = [(evaluation.step, evaluation.loss) for evaluation in view.evaluations][-MOST_POINTS:]
    trained = (view.series.step, view.shown(loss))
    dots = ([step for step, _ in validated], [loss for _, loss in validated])
    thin = [(view.series.step[: line.size], line) for line in (_rate(view), _scale(view))]
    return Drawn([trained, dots, *thin], y_type="log" if view.choice.log_loss else "linear")


def _loss_title(view: View) -> str:
    """Return the names of what is drawn, short ones where there are several: beside a notebook there is little room."""
    validated = bool(view.evaluations)
    drawn = [("eval", BLUE)] * validated
    if _rate(view).size:
        drawn.append(("lr" if validated else "learning rate", GREEN))
    names = "".join(f", <span style='color:{colour}'>{name}</span>" for name, colour in drawn)
    return f"Loss</b>{names}<b>"


def _rate(view: View) -> Array:
    """Return the learning rate, if it is not the same in all that is drawn: the knob says that."""
    rate = view.series.mean_of_ranks(lambda sample: sample.learning_rate)
    known = rate[np.isfinite(rate)]
    return rate if known.size and np.ptp(known) > 0 else rate[:0]


def _scale(view: View) -> Array:
    scale = view.series.mean_of_ranks(lambda sample: sample.loss_scale)
    return scale if np.isfinite(scale).any() else scale[:0]


def _thin(name: str, colour: str, axis: str) -> go.Scatter:
    line = {"color": colour, "width": 1}
    return go.Scatter(name=name, mode="lines", line=line, yaxis=axis, hovertemplate="%{y:.4g}")


LOSS = Chart(
    title=_loss_title,
    place=Place(row=1, column=1),
    traces=lambda view, axes: [
        go.Scatter(name="loss", mode="lines", line={"color": GREY, "width": 2}, hovertemplate="%{y:.4g}"),
        go.Scatter(
            name="validation",
            mode="lines+markers",
            line={"color": BLUE, "width": 2, "dash": "dot"},
            marker={"size": 7},
            hovertemplate="%{y:.4g}",
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


SPEED = Chart(
    title=lambda view: "Samples/s",
    place=Place(row=1, column=0),
    traces=lambda view, axes: [
        go.Scatter(name="all ranks", mode="lines", line={"color": SKY, "width": 2}, hovertemplate="%{y:,.2~f}")
    ],
    draw=_draw_speed,
)


_ROOM = 1.1  # above the longest step
_WORTH_A_NAME = 0.005  # of a step: less would be 0 %


def _draw_times(view: View, axes: Axes) -> Drawn:
    bands = view.series.means_of_ranks(lambda sample: (sample.times or UNKNOWN).seconds)
    if not bands.size:
        return Drawn([([], []) for _ in PARTS])
    drawn = [view.shown(1000 * band) for band in bands]
    longest = float(np.nan_to_num(np.sum(drawn, axis=0)).max(initial=0.0))
    y_range = [0.0, _ROOM * longest or 1.0]
    points = [(view.series.step, band) for band in drawn]
    names = _names(view, np.nan_to_num([band[-1] for band in drawn]))
    return Drawn(points, y_range, annotations=beside(names, axes, y_range, STEP_TIME.height_px))


def _names(view: View, latest: Array) -> list[Label]:
    """Return the names of the parts that a step takes longest for, with their shares; ``latest``: of the last step."""
    shares = [view.time.share(part) for part in PARTS] if view.time else []
    words = [f"{part} {100 * share:.0f} %" for part, share in zip(PARTS, shares, strict=bool(shares))]
    return largest_parts(latest, shares, words, [TIME_COLOURS[part] for part in PARTS], _WORTH_A_NAME)


STEP_TIME = Chart(
    title=lambda view: "Step, ms",
    place=Place(row=1, column=2),
    traces=lambda view, axes: [
        go.Scatter(
            name=part,
            stackgroup="time",
            mode="lines",
            line={"width": 0, "color": TIME_COLOURS[part]},
            fillcolor=TIME_COLOURS[part],
            hovertemplate="%{y:.1f} ms",
        )
        for part in PARTS
    ],
    draw=_draw_times,
)
