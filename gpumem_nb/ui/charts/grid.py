"""Where rows and columns of charts begin and end in the figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .chart import Place

_COLUMNS = ((0.0, 0.29), (0.36, 0.65), (0.72, 1.0))  # where they begin and end, of the figure's width
# The same of rows, upwards, of the height of a figure with two: the first is tall and leaves room for a legend.
_FIRST, _SECOND = (0.43, 0.91), (0.04, 0.31)
_EACH_MORE = 0.39  # what each row more adds to the height
_FIRST_TITLE, _TITLE = 0.045, 0.01  # above a chart
_LEGEND = -0.05  # of the whole figure, below the last row
_TWO_ROWS_PX = 688
_MARGIN_PX = {"l": 48, "r": 12, "t": 8, "b": 44}


@dataclass(frozen=True, slots=True)
class Grid:
    """Turns places into plotly's coordinates, which count from 0 to 1 within the margins.

    Attributes:
        more: how many rows there are below the second one.
    """

    more: int

    @classmethod
    def of(cls, places: Iterable[Place]) -> Grid:
        """The grid that these fit in."""
        return cls(max(0, *(place.row - 1 for place in places)))

    @property
    def height_px(self) -> int:
        """Of the figure with its margins."""
        return round(_TWO_ROWS_PX * self._stretch) + _MARGIN_PX["t"] + _MARGIN_PX["b"]

    @property
    def margin_px(self) -> dict[str, int]:
        """Around the charts."""
        return _MARGIN_PX

    @property
    def legend_y(self) -> float:
        """The top of the figure's legend."""
        return _LEGEND / self._stretch

    def across(self, place: Place) -> tuple[float, float]:
        """Left and right end of a chart."""
        return _COLUMNS[place.column][0], _COLUMNS[place.column + place.span - 1][1]

    def upwards(self, place: Place) -> tuple[float, float]:
        """Bottom and top of a chart."""
        bottom, top = _edges(place.row)
        return self._y(bottom), self._y(top)

    def title_y(self, place: Place) -> float:
        """The bottom of a chart's title."""
        return self._y(_edges(place.row)[1] + (_TITLE if place.row else _FIRST_TITLE))

    @property
    def _stretch(self) -> float:
        return 1 + _EACH_MORE * self.more

    def _y(self, of_two_rows: float) -> float:
        return (of_two_rows + _EACH_MORE * self.more) / self._stretch


def _edges(row: int) -> tuple[float, float]:
    if row == 0:
        return _FIRST
    lower = _EACH_MORE * (row - 1)
    return _SECOND[0] - lower, _SECOND[1] - lower
