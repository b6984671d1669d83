"""The table of charts. A new chart is one :class:`~.chart.Chart` in the file of its like, and one line in ``CHARTS``.

What a chart needs:

- a title, which may depend on what is shown;
- a place in the grid of three columns: a free row and column, and how many of them it spans. A row below the last
  one makes the figure taller;
- its traces while there is nothing to draw yet;
- what it draws from a :class:`~.view.View`: an x and a y for each of its traces, in their order. A value of each step
  comes from ``view.series``, thinned out: its ``highest`` of each rank, ``mean_of_ranks`` or ``sum_of_ranks``.

``SPEED`` is the smallest. Axes and legends get their numbers when the figure is assembled: a chart that refers to
them finds their names in the :class:`~.chart.Axes` it is given. A vertical line at each flip and failure is drawn
through every chart over steps, without its doing.
"""

from __future__ import annotations

from .chart import Chart
from .memory import PEAK_OF_STEPS, VRAM
from .steps import LOSS, SPEED, STEP_TIME

CHARTS: list[Chart] = [
    VRAM,
    PEAK_OF_STEPS,
    SPEED,
    LOSS,
    STEP_TIME,
]
