"""The figure of the panel, assembled from the table of charts; one message to the browser per update."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from typing import Any

from plotly import graph_objects as go

from ...internals.plotly_internals import LiveFigure
from ...shared.messages import RankInfo
from ..series import Mark
from ..style import GREY, VERMILION, theme_line_css
from . import table
from .chart import Axes, Chart, Drawn, Grid, straight_line
from .view import View

FIRST_TIMEOUT_S, LONGEST_TIMEOUT_S = 2.0, 60.0
_CLEAR = "rgba(0,0,0,0)"
_TITLE = {"xref": "paper", "yref": "paper", "showarrow": False, "xanchor": "left", "yanchor": "bottom"}
_TITLE_PX, _TEXT_PX, _LABEL_PX = 13, 11, 11
# Between two steps there is none, but plotly puts ticks there where there are few.
_STEP_TICKS = [{"dtickrange": [None, 0.9], "value": "~g"}, {"dtickrange": [1, None], "value": "d"}]
_FEW_TICKS = 3


@dataclass(frozen=True, slots=True)
class _Placed:
    """A chart in the figure."""

    chart: Chart
    axes: Axes
    traces: Sequence[Any]


class Assembly:
    """The charts that are in the table now, each with its place and its axes; ``scale``: how many times as large."""

    def __init__(self, ranks: Sequence[RankInfo], scale: float = 1.0) -> None:
        self._placed = _place(table.CHARTS, View.before(ranks))
        self._scale = scale
        self._grid = Grid.of((placed.chart.place for placed in self._placed), scale)
        of_theme = [placed.axes for placed in self._placed if placed.chart.theme_lines]
        below_px, memory_px = self._grid.above_px(0), self._grid.height_px - self._grid.above_px(0)
        self.css = f".gpumem-charts {{ --gpumem-below: {below_px}px; --gpumem-memory: {memory_px}px; }}\n"
        self.css += "".join(theme_line_css(axes.x + axes.y) for axes in of_theme)

    def still(self, view: View) -> go.Figure:
        """Return a figure of one moment, which stays as it is."""
        x, y, layout = self.drawn(view)
        figure = go.Figure(data=self.traces, layout=self.first_layout())
        figure.plotly_update({"x": x, "y": y}, layout)
        return figure

    @property
    def traces(self) -> list[Any]:
        """Those of all charts, still without points."""
        return [trace for placed in self._placed for trace in placed.traces]

    def drawn(self, view: View) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """Return the x and the y of all traces, and what of the layout follows from what is shown."""
        drawn = [placed.chart.draw(view, placed.axes) for placed in self._placed]
        points = [point for of_chart in drawn for point in of_chart.points]
        return [x for x, _ in points], [y for _, y in points], self._layout(view, drawn)

    @property
    def _over_steps(self) -> list[_Placed]:
        """Charts over steps, from the top. The first one's axis is what the others follow."""
        found = [placed for placed in self._placed if placed.chart.over_steps]
        return sorted(found, key=lambda placed: (placed.chart.place.row, placed.chart.place.column))

    def _layout(self, view: View, drawn: Sequence[Drawn]) -> dict[str, Any]:
        layout: dict[str, Any] = {}
        for placed, of_chart in zip(self._placed, drawn, strict=True):
            axis = _key(placed.axes.y)
            layout[f"{axis}.type"] = of_chart.y_type
            if of_chart.y_range is not None:
                layout[f"{axis}.range"] = of_chart.y_range
        for placed in self._over_steps:  # no numbers are made up before there are any
            layout[f"{_key(placed.axes.y)}.showticklabels"] = view.has_steps
        shapes = [shape for of_chart in drawn for shape in of_chart.shapes]
        notes = [note for of_chart in drawn for note in of_chart.annotations]
        labels = [mark_labels(view, placed.axes) for placed in self._placed if placed.chart.names_marks]
        return layout | {
            "shapes": shapes + mark_lines(view, [placed.axes for placed in self._over_steps]),
            "annotations": list(chain(self._titles(view), notes, *labels)),
        }

    def _titles(self, view: View) -> list[dict[str, Any]]:
        return [
            {
                "text": f"<b>{placed.chart.title(view)}</b>",
                "x": self._grid.across(placed.chart.place)[0],
                "y": self._grid.title_y(placed.chart.place),
                # The first column's begin at the panel's edge: that leaves the next column's their place.
                "xshift": 0 if placed.chart.place.column else 4 - self._grid.margin_px["l"],
                "font": {"size": _TITLE_PX * self._scale},
                **_TITLE,
            }
            for placed in self._placed
        ]

    def first_layout(self) -> dict[str, Any]:
        """Return the layout before anything is drawn."""
        layout: dict[str, Any] = {
            "height": self._grid.height_px,
            "autosize": True,
            "margin": self._grid.margin_px,
            "paper_bgcolor": _CLEAR,
            "plot_bgcolor": _CLEAR,
            "font": {"size": _TEXT_PX * self._scale},
            "barmode": "stack",
            "dragmode": "zoom",
            "hovermode": "x unified",  # every series of a chart at once
            "hoverlabel": {"font": {"size": _LABEL_PX * self._scale}},
            "showlegend": False,
        }
        for placed in self._placed:
            layout |= self._layout_of(placed)
        return layout

    def _layout_of(self, placed: _Placed) -> dict[str, Any]:
        """Return a chart's axes. Steps can be zoomed, in all charts at once; nothing else can."""
        chart, axes = placed.chart, placed.axes
        place = chart.place
        x: dict[str, Any] = {"domain": self._grid.across(place), "anchor": axes.y, "showgrid": False}
        y: dict[str, Any] = {
            "domain": self._grid.upwards(place),
            "anchor": axes.x,
            "rangemode": "tozero",
            "gridcolor": GREY,
        }
        if chart.over_steps:
            lowest = self._grid.is_lowest(place)
            first = self._over_steps[0].axes.x
            # Invisible ticks keep their labels off that of the y axis' 0.
            apart = {"ticks": "outside", "ticklen": 6, "tickcolor": _CLEAR}
            x |= {"tickformatstops": _STEP_TICKS, "showticklabels": lowest} | apart
            x |= {} if axes.x == first else {"matches": first}
            x |= {"unifiedhovertitle": {"text": "step %{x}"}, "tickangle": 0}
            x |= {"nticks": _FEW_TICKS} if place.span == 1 else {}
            title = "step" if lowest else ""
        else:
            x |= {"type": "category", "tickangle": 0, "fixedrange": True}
            x |= {"unifiedhovertitle": {"text": "rank %{x}"}}
            title = chart.x_title
        if title:
            x["title"] = {"text": title, "standoff": 2, "font": {"size": _TEXT_PX * self._scale}}
        if place.row and place.rows == 1:
            y["nticks"] = _FEW_TICKS
        layout: dict[str, Any] = {_key(axes.x): x, _key(axes.y): y | {"fixedrange": True}}
        if chart.second_y:
            second = {"overlaying": axes.y, "anchor": axes.x, "matches": axes.y, "visible": False, "fixedrange": True}
            layout[_key(axes.second_y)] = second
        for unseen in axes.unseen_y:
            over = {"overlaying": axes.y, "anchor": axes.x, "rangemode": "tozero", "visible": False, "fixedrange": True}
            layout[_key(unseen)] = over
        return layout


class Charts:
    """The live figure of some ranks: a widget, and the CSS that goes with it."""

    def __init__(self, ranks: Sequence[RankInfo], scale: float = 1.0) -> None:
        self._assembly = Assembly(ranks, scale)
        self._sent: dict[str, Any] = {}
        self._waits_since_s = 0.0
        self._timeout_s = FIRST_TIMEOUT_S
        self._unsure = True  # whether a page has missed something
        self.css = self._assembly.css
        self.figure = LiveFigure(data=self._assembly.traces, layout=self._assembly.first_layout())

    def update(self, view: View) -> None:
        """Draw it."""
        x, y, layout = self._assembly.drawn(view)
        changed = {name: value for name, value in layout.items() if self._sent.get(name) != value}
        if self.figure.acknowledged:
            self._waits_since_s = time.monotonic()
        if "pandas" in sys.modules:
            importlib.import_module("pandas")  # which waits for a thread that is at it: plotly uses it half made
        self.figure.plotly_update({"x": x, "y": y}, changed)
        self._sent = layout  # by now: what failed is sent with the next update

    def look_after(self) -> None:
        """Send all of it again when a page answers for the first time, and when none has answered for long.

        The longer no page answers, the longer the pause before all is sent again: perhaps no page is open.
        """
        if not self._sent:
            return
        if self.figure.acknowledged:
            self._timeout_s = FIRST_TIMEOUT_S
            if self._unsure:
                self._unsure = False
                self.figure.resend(self._sent)
        elif time.monotonic() - self._waits_since_s >= self._timeout_s:
            self._timeout_s = min(LONGEST_TIMEOUT_S, 2 * self._timeout_s)
            self._waits_since_s, self._unsure = time.monotonic(), True
            self.figure.resend(self._sent)


def _place(charts: Sequence[Chart], view: View) -> list[_Placed]:
    """Return each chart with its axes: plotly's names end in a number, which the first axis does without."""
    placed = []
    further = map("y{}".format, itertools.count(len(charts) + 1))
    for number, chart in enumerate(charts, start=1):
        suffix = "" if number == 1 else str(number)
        second_y = next(further) if chart.second_y else ""
        axes = Axes(f"x{suffix}", f"y{suffix}", second_y, tuple(itertools.islice(further, chart.unseen_y)))
        traces = chart.traces(view, axes)
        for trace in traces:
            trace.update(xaxis=trace.xaxis or axes.x, yaxis=trace.yaxis or axes.y)
        placed.append(_Placed(chart, axes, traces))
    return placed


def _key(axis: str) -> str:
    """Return the name of an axis as a key of the layout: ``yaxis3`` for ``y3``."""
    return f"{axis[0]}axis{axis[1:]}"


_LEVELS = 3  # words that would cover each other go below each other
_LETTER = 0.03  # of a narrow chart's width
_MOST_LETTERS = 16
_LEVEL_HEIGHT = 0.1


def mark_lines(view: View, over_steps: Sequence[Axes]) -> list[dict[str, Any]]:
    """Return a vertical line through each chart for each mark."""
    return [
        straight_line(axes.x, (mark.step,) * 2, f"{axes.y} domain", (0, 1), *_look(mark))
        for mark in view.marks
        for axes in over_steps
    ]


def mark_labels(view: View, axes: Axes) -> list[dict[str, Any]]:
    """Return what the marks say at the top of a wide chart, newest first, each on a level where it covers no other.

    One that has no place is left out: its line is there. Hovering over one says all of it, with its step.
    """
    steps = view.series.step
    first, last = (steps[0], steps[-1]) if steps.size else (0.0, 0.0)
    place = {"xref": axes.x, "yref": f"{axes.y} domain", "yanchor": "top", "showarrow": False}
    taken_from = [math.inf] * _LEVELS
    labels = []
    for mark in reversed(view.marks):
        at = (mark.step - first) / max(1.0, last - first)
        words = mark.text if len(mark.text) <= _MOST_LETTERS else f"{mark.text[: _MOST_LETTERS - 1]}…"
        width = _LETTER * len(words)
        begins = at if at + width <= 1 else at - width  # to the right of its line, or to the left near the end
        level = next((level for level, begin in enumerate(taken_from) if begins + width <= begin), None)
        if level is None:
            continue
        taken_from[level] = begins
        # The style sheet has the theme's colour for the background.
        look = {"bgcolor": "white", "borderpad": 0, "font": {"color": _look(mark)[0]}}
        look["hovertext"] = f"step {mark.step:,}: {escape(mark.text)}"
        look["xanchor"] = "left" if begins == at else "right"
        shift = {"x": mark.step, "y": 1 - _LEVEL_HEIGHT * level, "xshift": 3 if begins == at else -3}
        labels.append({"text": escape(words)} | shift | place | look)
    return labels


def _look(mark: Mark) -> tuple[str, str, int]:
    return (VERMILION, "solid", 2) if mark.bad else (GREY, "dot", 2)
