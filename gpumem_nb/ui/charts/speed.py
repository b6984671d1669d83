"""The samples/s of all ranks together."""

from __future__ import annotations

from plotly import graph_objects as go

from ..style import SKY
from .chart import Axes, Chart, Drawn, Place
from .view import View


def _draw(view: View, _: Axes) -> Drawn:
    speed = view.series.sum_of_ranks(lambda sample: sample.samples_per_s)
    return Drawn([(view.series.step, view.shown(speed))])


def _title(view: View) -> str:
    if view.time and (late := view.time.straggler):  # short: it stands on two thirds of a narrow panel
        return f"Samples/s (others wait {100 * late.share:.0f} % for rank {late.rank})"
    return "Samples/s, all ranks"


SPEED = Chart(
    title=_title,
    place=Place(row=1, column=1, span=2),
    traces=lambda view, axes: [
        go.Scatter(name="samples/s", mode="lines", line={"color": SKY, "width": 2}, hovertemplate="step %{x}: %{y:.0f}")
    ],
    draw=_draw,
)
