"""How many samples each rank trains a second; its legend names the ranks' lines for all charts."""

from __future__ import annotations

from .chart import Axes, Chart, Drawn, Place
from .lines import rank_lines
from .view import View


def _draw(view: View, _: Axes) -> Drawn:
    speeds = view.series.mean(lambda sample: sample.samples_per_s)
    return Drawn([(view.series.step, speed) for speed in speeds])


SPEED = Chart(
    title=lambda view: "Samples/s of each rank",
    place=Place(row=1, column=0),
    traces=lambda view, axes: rank_lines(view, decimals=0, in_legend=True),
    draw=_draw,
)
