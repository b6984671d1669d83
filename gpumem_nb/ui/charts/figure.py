"""The figure of the panel, assembled from the table of charts; one message to the browser per update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ...internals.plotly_internals import LiveFigure
from ...shared.messages import RankInfo
from ..style import GREY, theme_line_css
from . import table
from .chart import Axes, Chart, Drawn
from .grid import Grid
from .marks import mark_labels, mark_lines
from .view import View

_STEP_AXIS = {"title": {"text": "optimizer step", "standoff": 2, "font": {"size": 14}}, "tickformat": "d"}
_CLEAR = "rgba(0,0,0,0)"
_LEGEND = {"orientation": "h", "yanchor": "bottom", "bgcolor": _CLEAR}
_TITLE = {"xref": "paper", "yref": "paper", "showarrow": False, "xanchor": "left", "yanchor": "bottom"}


@dataclass(frozen=True, slots=True)
class _Placed:
    """A chart in the figure."""

    chart: Chart
    axes: Axes
    traces: Sequence[Any]

    def draw(self, view: View) -> Drawn:
        drawn = self.chart.draw(view, self.axes)
        if len(drawn.points) != len(self.traces):
            what = f"{len(self.traces)} traces and points for {len(drawn.points)}"
            raise ValueError(f"The chart {self.chart.title(view)!r} has {what}.")
        return drawn


class Charts:
    """The live figure of some ranks, with the charts that are in the table now.

    Attributes:
        figure: the widget to show.
        css: the style sheet that goes with it.
    """

    def __init__(self, ranks: Sequence[RankInfo]) -> None:
        self._placed = _place(table.CHARTS, View.before(ranks))
        self._grid = Grid.of(placed.chart.place for placed in self._placed)
        self._sent: dict[str, Any] = {}
        of_theme = [placed.axes for placed in self._placed if placed.chart.theme_lines]
        self.css = "".join(theme_line_css(axes.x + axes.y) for axes in of_theme)
        self.figure = LiveFigure(
            data=[trace for placed in self._placed for trace in placed.traces], layout=self._first_layout()
        )

    def update(self, view: View) -> None:
        """Draw it."""
        drawn = [placed.draw(view) for placed in self._placed]
        points = [point for of_chart in drawn for point in of_chart.points]
        layout = self._layout(view, drawn)
        changed = {name: value for name, value in layout.items() if self._sent.get(name) != value}
        self._sent = layout
        self.figure.plotly_update({"x": [x for x, _ in points], "y": [y for _, y in points]}, changed)

    def _layout(self, view: View, drawn: Sequence[Drawn]) -> dict[str, Any]:
        ranges = {
            f"{_key(placed.axes.y)}.range": of_chart.y_range
            for placed, of_chart in zip(self._placed, drawn, strict=True)
            if of_chart.y_range is not None
        }
        shapes = [shape for of_chart in drawn for shape in of_chart.shapes]
        notes = [note for of_chart in drawn for note in of_chart.annotations]
        over_steps = [placed.axes for placed in self._placed if placed.chart.over_steps]
        labels = [mark_labels(view, placed.axes) for placed in self._placed if placed.chart.names_marks]
        return ranges | {
            "shapes": shapes + mark_lines(view, over_steps),
            "annotations": list(chain(self._titles(view), notes, *labels)),
        }

    def _titles(self, view: View) -> list[dict[str, Any]]:
        return [
            {
                "text": f"<b>{placed.chart.title(view)}</b>",
                "x": self._grid.across(placed.chart.place)[0],
                "y": self._grid.title_y(placed.chart.place),
                "font": {"size": 17},
                **_TITLE,
            }
            for placed in self._placed
        ]

    def _first_layout(self) -> dict[str, Any]:
        layout: dict[str, Any] = {
            "height": self._grid.height_px,
            "autosize": True,
            "margin": self._grid.margin_px,
            "paper_bgcolor": _CLEAR,
            "plot_bgcolor": _CLEAR,
            "font": {"size": 14},
            "barmode": "stack",
            "dragmode": False,
            "legend": _LEGEND | {"x": 0.5, "xanchor": "center", "y": self._grid.legend_y, "yanchor": "top"},
        }
        for placed in self._placed:
            layout |= _layout_of(placed.chart, placed.axes, self._grid)
        return layout


def _place(charts: Sequence[Chart], view: View) -> list[_Placed]:
    """Each chart with its axes: plotly's names end in a number, which the first axis does without."""
    placed = []
    second_y, legend = len(charts) + 1, 2
    for number, chart in enumerate(charts, start=1):
        suffix = "" if number == 1 else str(number)
        axes = Axes(
            x=f"x{suffix}",
            y=f"y{suffix}",
            second_y=f"y{second_y}" if chart.second_y else "",
            legend=f"legend{legend}" if chart.own_legend else "legend",
        )
        second_y += chart.second_y
        legend += chart.own_legend
        traces = chart.traces(view, axes)
        for trace in traces:
            trace.update(xaxis=trace.xaxis or axes.x, yaxis=trace.yaxis or axes.y)
        placed.append(_Placed(chart, axes, traces))
    return placed


def _layout_of(chart: Chart, axes: Axes, grid: Grid) -> dict[str, Any]:
    """A chart's axes and legend."""
    across, upwards = grid.across(chart.place), grid.upwards(chart.place)
    step = _STEP_AXIS if chart.over_steps else {}
    layout: dict[str, Any] = {
        _key(axes.x): {"domain": across, "anchor": axes.y, "showgrid": False, **step},
        _key(axes.y): {"domain": upwards, "anchor": axes.x, "rangemode": "tozero", "gridcolor": GREY},
    }
    if chart.second_y:
        layout[_key(axes.second_y)] = {"overlaying": axes.y, "anchor": axes.x, "matches": axes.y, "visible": False}
    if chart.own_legend:
        layout[axes.legend] = _LEGEND | {"x": across[0] - 0.02, "xanchor": "left", "y": upwards[1]}
    return layout


def _key(axis: str) -> str:
    """The name of an axis as a key of the layout: ``yaxis3`` for ``y3``."""
    return f"{axis[0]}axis{axis[1:]}"
