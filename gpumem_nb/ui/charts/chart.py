"""One chart: its place in the grid, its title, and what it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..series import Array
from .view import View

Values = Array | Sequence[str] | Sequence[float]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a chart: row and column of the grid, both from 0, and how many columns and rows it spans."""

    row: int
    column: int
    span: int = 1
    rows: int = 1


@dataclass(frozen=True, slots=True)
class Axes:
    """The names under which plotly knows a chart's axes.

    Attributes:
        x: such as ``x3``.
        y: such as ``y3``.
        second_y: the axis over ``y``, for a chart that has one.
        unseen_y: further ones over ``y``, each with a range of its own.
    """

    x: str
    y: str
    second_y: str = ""
    unseen_y: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """The data that a chart draws.

    Attributes:
        points: x and y of each trace, in the order of the chart's traces.
        y_range: where the y axis begins and ends; plotly chooses where it is ``None``.
        y_type: plotly's type of the y axis.
        shapes: plotly's, with references to the chart's axes.
        annotations: the same.
    """

    points: Sequence[tuple[Values, Values]]
    y_range: Sequence[float] | None = None
    y_type: str = "linear"
    shapes: Sequence[Mapping[str, Any]] = ()
    annotations: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of the panel.

    Attributes:
        title: the text above it.
        place: where it stands.
        traces: plotly's traces without points. The ones that name no axes get the chart's own ``x`` and ``y``.
        draw: the points of these traces, and what else changes.
        over_steps: whether its x axis is the optimizer step; it is zoomed with all others then, and marks are drawn
            through it.
        x_title: the text below it, where it is not over steps.
        second_y: whether an invisible y axis of the same range lies over its own. A bar on an axis of its own is drawn
            around a stack instead of on top of it.
        unseen_y: how many more invisible y axes lie over its own, for lines in other units that are read by hovering.
        names_marks: whether what marks say stands at its top; its ``y_range`` leaves room for them.
        theme_lines: whether its lines have the colour of the theme's text, whatever colour the traces say.
    """

    title: Callable[[View], str]
    place: Place
    traces: Callable[[View, Axes], Sequence[Any]]
    draw: Callable[[View, Axes], Drawn]
    over_steps: bool = True
    x_title: str = ""
    second_y: bool = False
    unseen_y: int = 0
    names_marks: bool = False
    theme_lines: bool = False

    @property
    def height_px(self) -> int:
        """Of what it draws in, at the usual size."""
        rows = range(self.place.row, self.place.row + self.place.rows)
        return sum(_HEIGHTS[row] if row < _SHARED_ROWS else _MORE for row in rows)


_COLUMNS = ((0.0, 0.27), (0.365, 0.635), (0.73, 1.0))  # where they begin and end, of the width within the margins
# Heights in pixels. Over steps the first rows share one axis, whose ticks stand below the last of them.
_HEIGHTS = (150, 62)
_MORE = 160  # of each further row
_TITLE, _TICKS = 23, 40  # above each row, and below those that share their axis with none
_HALF_TICK = 5  # what the number of a tick at the very top of a chart takes of the title above it
_ABOVE_LAST = 16  # more above the last of the first rows: the numbers of ranks stand there
_MARGIN = {"l": 44, "r": 136, "t": 2, "b": 34}  # what is drawn is named in the right one
_SHARED_ROWS = len(_HEIGHTS)


@dataclass(frozen=True, slots=True)
class Grid:
    """Turns places into plotly's coordinates, which count from 0 to 1 within the margins, upwards.

    Attributes:
        rows: how many there are.
        scale: how many times as large everything is.
    """

    rows: int
    scale: float = 1.0

    @classmethod
    def of(cls, places: Iterable[Place], scale: float = 1.0) -> Grid:
        """Return the grid that these fit in."""
        return cls(max(_SHARED_ROWS, *(place.row + place.rows for place in places)), scale)

    @property
    def height_px(self) -> int:
        """Of the figure with its margins."""
        margin = self.margin_px
        return round(self._end(self.rows - 1) * self.scale) + margin["t"] + margin["b"]

    @property
    def margin_px(self) -> dict[str, int]:
        """Around the charts."""
        return {side: round(pixels * self.scale) for side, pixels in _MARGIN.items()}

    def above_px(self, row: int) -> int:
        """Return how far from the bottom of the figure the charts of a row end."""
        return round((self._end(self.rows - 1) - self._end(row)) * self.scale) + self.margin_px["b"]

    def is_lowest(self, place: Place) -> bool:
        """Return whether ticks of steps stand below a chart: in the first rows, below the last of them alone."""
        return place.row + place.rows >= _SHARED_ROWS

    def across(self, place: Place) -> tuple[float, float]:
        """Left and right end of a chart."""
        return _COLUMNS[place.column][0], _COLUMNS[place.column + place.span - 1][1]

    def upwards(self, place: Place) -> tuple[float, float]:
        """Bottom and top of a chart."""
        return self._y(self._end(place.row + place.rows - 1)), self._y(self._begin(place.row))

    def title_y(self, place: Place) -> float:
        """Return the bottom of a chart's title."""
        return self._y(self._begin(place.row) - _HALF_TICK)

    def _y(self, from_top: float) -> float:
        return 1 - from_top / self._end(self.rows - 1)

    def _begin(self, row: int) -> float:
        """Pixels from the top of the figure to the top of a row's charts."""
        above = 0 if row == 0 else self._end(row - 1) + (_TICKS if row >= _SHARED_ROWS else 0)
        return above + _TITLE + (_ABOVE_LAST if row == _SHARED_ROWS - 1 else 0)

    def _end(self, row: int) -> float:
        return self._begin(row) + (_HEIGHTS[row] if row < _SHARED_ROWS else _MORE)


@dataclass(frozen=True, slots=True)
class Label:
    """What is written beside a chart at the height of a value: words, behind a square of a colour."""

    words: str
    value: float
    colour: str


def largest_parts(
    heights: Array, sizes: Sequence[float], words: Sequence[str], colours: Sequence[str], least: float = 0.0
) -> list[Label]:
    """Return labels of the largest parts of a stack.

    Args:
        heights: of the parts where the stack ends, from the bottom up.
        sizes: by which they are compared; only what is larger than ``least`` gets a label.
        words, colours: of each part.
    """
    middles = np.cumsum(heights) - heights / 2
    ordered = sorted(range(len(sizes)), key=lambda place: -sizes[place])[:_NAMED]
    return [Label(words[place], float(middles[place]), colours[place]) for place in ordered if sizes[place] > least]


_NAMED = 3


def beside(labels: Sequence[Label], axes: Axes, y_range: Sequence[float], height_px: float) -> list[dict[str, Any]]:
    """Return plotly's annotations to the right of a chart, each as near to its value as the others allow.

    Args:
        y_range: where the y axis begins and ends.
        height_px: of the chart.
    """
    low, high = y_range
    apart = _LINE_PX * (high - low) / height_px
    ordered = sorted(labels, key=lambda label: label.value)
    heights: list[float] = []
    for label in ordered:
        heights.append(max(label.value, low + apart / 2, heights[-1] + apart if heights else low))
    if heights and (over := heights[-1] - (high - apart / 2)) > 0:
        heights[-1] -= over
        for place in range(len(heights) - 2, -1, -1):
            heights[place] = min(heights[place], heights[place + 1] - apart)
    place_of = {"xref": f"{axes.x} domain", "x": 1, "xanchor": "left", "xshift": 4, "yref": axes.y, "showarrow": False}
    return [
        {"text": f"<span style='color:{label.colour}'>■</span> {label.words}", "y": height, "yanchor": "middle"}
        | {"align": "left"}
        | place_of
        for label, height in zip(ordered, heights, strict=True)
    ]


_LINE_PX = 14  # from one line of labels to the next


def straight_line(
    xref: str, x: tuple[float, float], yref: str, y: tuple[float, float], colour: str, dash: str, width_px: int
) -> dict[str, Any]:
    """Return a shape from ``x[0], y[0]`` to ``x[1], y[1]``."""
    ends = {"xref": xref, "x0": x[0], "x1": x[1], "yref": yref, "y0": y[0], "y1": y[1]}
    return {"type": "line", **ends, "line": {"color": colour, "dash": dash, "width": width_px}}
