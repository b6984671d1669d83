"""How long a step takes on each rank."""

from __future__ import annotations

from .chart import Axes, Chart, Drawn, Place
from .lines import rank_lines
from .view import View


def _draw(view: View, _: Axes) -> Drawn:
    times_ms = view.series.mean(lambda sample: sample.step_s) * 1000
    return Drawn([(view.series.step, time_ms) for time_ms in times_ms])


STEP_TIME = Chart(
    title=lambda view: "Step time, ms",
    place=Place(row=1, column=2),
    traces=lambda view, axes: rank_lines(view, decimals=1),
    draw=_draw,
)
