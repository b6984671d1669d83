"""The bounds of rows and columns of charts in the figure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .chart import Place

_COLUMNS = ((0.0, 0.27), (0.35, 0.66), (0.73, 1.0))  # where they begin and end, of the figure's width
# Heights in pixels. Over steps the first rows share one axis, whose ticks stand below the last of them.
_HEIGHTS = (121, 57, 57)
_MORE = 160  # of each further row
_TITLE, _TICKS = 27, 40  # above each row, and below those that share their axis with none
_HALF_TICK = 5  # what the number of a tick at the very top of a chart takes of the title above it
_ABOVE_LAST = 14  # more above the last of the first rows: the numbers of ranks stand there
_MARGIN = {"l": 48, "r": 10, "t": 2, "b": 40}
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
