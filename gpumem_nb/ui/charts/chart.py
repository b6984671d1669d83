"""One chart: its place, its title, and what it draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..series import Array
from .view import View

COLUMNS = 3  # of the grid
Values = Array | Sequence[str] | Sequence[float]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a chart: row and column of the grid, both from 0, and how many columns and rows it spans.

    Raises:
        ValueError: it is outside of the grid.
    """

    row: int
    column: int
    span: int = 1
    rows: int = 1

    def __post_init__(self) -> None:
        if self.row < 0 or self.rows < 1 or not 0 <= self.column < self.column + self.span <= COLUMNS:
            last = self.column + self.span - 1
            raise ValueError(
                f"Row {self.row}, columns {self.column} to {last}: rows count from 0, columns from 0 to {COLUMNS - 1}."
            )

    def overlaps(self, other: Place) -> bool:
        """Return whether both want the same part of the figure."""
        beside = self.column + self.span <= other.column or other.column + other.span <= self.column
        apart = self.row + self.rows <= other.row or other.row + other.rows <= self.row
        return not (beside or apart)

    def is_on(self, other: Place) -> bool:
        """Return whether it stands right above another one that is as wide."""
        return (self.column, self.span, self.row + self.rows) == (other.column, other.span, other.row)


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
        names_marks: whether the numbers of marks stand at its top; its ``y_range`` leaves room for them.
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
