"""The charts: VRAM now and over time, throughput, loss and step time; one message to the browser per update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..sample import RankInfo, Reading
from . import drawing
from .figure import make_figure
from .series import Mark, Series

_LIMIT_IN_SIGHT = 4  # a limit more than so many times the highest bar would flatten it, and is told in words
_HEADROOM = 1.5  # room above for the labels of marks
_GIB, _MIB = 2**30, 2**20


class Charts:
    """The live figure of some ranks.

    Attributes:
        figure: the widget to show.
    """

    def __init__(self, ranks: Sequence[RankInfo]) -> None:
        self._virtual = " (virtual)" if any(info.virtual for info in ranks) else ""
        self._names = [f"rank {info.rank}" for info in ranks]
        self._sent: dict[str, Any] = {}
        self.figure = make_figure(self._names)

    def update(self, readings: Sequence[Reading | None], seen: Series, marks: Sequence[Mark]) -> None:
        """Draw this."""
        present = [reading for reading in readings if reading]
        bytes_now = [value for reading in present for value in (reading.live_peak, reading.reserved or 0)]
        top = max([1, int(seen.peak.max(initial=0)), *bytes_now])
        scale = _GIB if top >= 2 * _GIB else _MIB
        bars = [
            [_scaled(getattr(reading, name, None), scale) for reading in readings]
            for name in ("reserved", "live_peak", "live", "limit")
        ]
        y = [*map(np.array, bars), *seen.peak / scale, *seen.speed, seen.loss, *seen.seconds * 1000]
        x = [self._names] * len(bars) + [seen.step] * (len(y) - len(bars))
        layout = self._layout(top, scale, {reading.limit for reading in present if reading.limit}, marks, seen)
        changed = {name: value for name, value in layout.items() if self._sent.get(name) != value}
        self._sent = layout
        self.figure.plotly_update({"x": x, "y": y}, changed)

    def _layout(self, top: int, scale: int, limits: set[int], marks: Sequence[Mark], seen: Series) -> dict[str, Any]:
        shown = sorted(limit for limit in limits if limit <= top * _LIMIT_IN_SIGHT)
        hidden = sorted(limits.difference(shown))
        highest = _HEADROOM * max([top, *shown]) / scale
        first, last = (seen.step[0], seen.step[-1]) if seen.step.size else (0.0, 0.0)
        return {
            "yaxis.range": [0, highest],
            "yaxis2.range": [0, highest],
            "shapes": drawing.limit_lines([limit / scale for limit in shown]) + drawing.mark_lines(marks),
            "annotations": drawing.titles("GiB" if scale == _GIB else "MiB", self._virtual)
            + drawing.limits_out_of_sight(hidden, top)
            + drawing.mark_labels(marks, first, last),
        }


def _scaled(value: int | None, scale: int) -> float:
    return math.nan if value is None else value / scale
