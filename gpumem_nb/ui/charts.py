"""The charts: what fills the VRAM, throughput, loss and step time; one message to the browser per update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..shared.categories import CATEGORIES
from ..shared.messages import RankInfo, Reading
from . import drawing
from .bands import Bands, Peak, shown, worst_first
from .figure import make_figure
from .series import Mark, Series, lines

_LIMIT_IN_SIGHT = 3  # a limit more than so many times the highest bar would flatten it, and is told in words
_HEADROOM = 1.35  # room above for the labels of marks
_GIB, _MIB = 2**30, 2**20


class Charts:
    """The live figure of some ranks.

    Attributes:
        figure: the widget to show.
    """

    def __init__(self, ranks: Sequence[RankInfo]) -> None:
        self._virtual = " (virtual)" if any(info.virtual for info in ranks) else ""
        self._lines = lines(len(ranks))
        self._sent: dict[str, Any] = {}
        self.figure = make_figure(self._lines, real=not self._virtual)

    def update(
        self,
        readings: Sequence[Reading | None],
        peaks: Sequence[Peak],
        bands: Bands,
        seen: Series,
        marks: Sequence[Mark],
    ) -> None:
        """Draw these values; ``bands`` are the worst rank's."""
        present = [reading for reading in readings if reading]
        bytes_now = [value for reading in present for value in (reading.live_peak_bytes, reading.reserved_bytes or 0)]
        top = max([1, int(seen.peak.max(initial=0)), *bytes_now, *(peak.bytes for peak in peaks)])
        scale = _GIB if top >= 2 * _GIB else _MIB
        bars = shown(peaks)
        stacks = [[_part(peak, name) for peak in bars.values()] for name in (*CATEGORIES, None)]
        truths = [
            [getattr(readings[peak.rank], name, None) for peak in bars.values()]
            for name in ("reserved_bytes", "live_bytes", "device_used_bytes", "limit_bytes")
        ]
        now = [np.array([_scaled(value, scale) for value in of_ranks]) for of_ranks in (*stacks, *truths)]
        y = [*now, *bands.live / scale, *seen.peak / scale, *seen.speed, seen.loss, *seen.seconds * 1000]
        x = [list(bars)] * len(now) + [bands.step] * len(bands.live)
        x += [seen.step] * (len(y) - len(x))
        worst = worst_first(peaks)[0].rank if peaks else 0
        layout = self._layout(
            top, scale, {reading.limit_bytes for reading in present if reading.limit_bytes}, marks, seen, worst
        )
        changed = {name: value for name, value in layout.items() if self._sent.get(name) != value}
        self._sent = layout
        self.figure.plotly_update({"x": x, "y": y}, changed)

    def _layout(
        self, top: int, scale: int, limits: set[int], marks: Sequence[Mark], seen: Series, worst: int
    ) -> dict[str, Any]:
        shown = sorted(limit for limit in limits if limit <= top * _LIMIT_IN_SIGHT)
        hidden = sorted(limits.difference(shown))
        highest = _HEADROOM * max([top, *shown]) / scale
        first, last = (seen.step[0], seen.step[-1]) if seen.step.size else (0.0, 0.0)
        return {
            "yaxis.range": [0, highest],
            "yaxis2.range": [0, highest],
            "shapes": drawing.limit_lines([limit / scale for limit in shown]) + drawing.mark_lines(marks),
            "annotations": drawing.titles("GiB" if scale == _GIB else "MiB", self._virtual, worst, self._lines)
            + drawing.limits_out_of_sight(hidden, top)
            + drawing.mark_labels(marks, first, last),
        }


def _part(peak: Peak, category: str | None) -> int | None:
    """What a category takes of a peak; ``None`` stands for all of one that was not recorded."""
    if category is None:
        return None if peak.ledger else peak.bytes
    # Nothing is 0 here: a gap would make plotly begin the stack anew above it.
    return peak.ledger.at_peak.get(category, 0) if peak.ledger else None


def _scaled(value: int | None, scale: int) -> float:
    return math.nan if value is None else value / scale
