"""The charts: one plotly figure, one message per update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from plotly import graph_objects as go

from ..memory.units import format_bytes
from ..sample import RankInfo, Reading, Sample
from .series import Array, Mark, Series
from .style import BLUE, DASHES, GREY, RANK_COLOURS, SKY, VERMILION

HEIGHT_PX = 620
_COLUMNS = ((0.0, 0.3), (0.37, 0.65), (0.72, 1.0))
_UPPER, _LOWER = (0.58, 0.9), (0.02, 0.34)
_OVER_TIME = ("2", "3", "4", "5")  # the axes whose x is the optimizer step
_LIMIT_IN_SIGHT = 4.0  # a limit more than this many times the peak would flatten the bars, so it is told in words
_MARK_LEVELS = 3


class LiveFigure(go.FigureWidget):  # type: ignore[misc]
    """A figure that a page which is loaded again shows as it is now; plotly's own sends it as it was at first."""

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """What the browser is told; everything, when it asks for everything."""
        if key is None and self._data:
            with self.hold_trait_notifications():
                self._trait_values["_widget_data"] = [dict(trace) for trace in self._data]
                self._trait_values["_widget_layout"] = dict(self._layout_obj._props)
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        return state


class Charts:
    """VRAM now and over time, throughput, loss and step time of some ranks.

    Attributes:
        figure: the widget.
    """

    def __init__(self, ranks: Sequence[RankInfo]) -> None:
        virtual = " (virtual)" if all(info.virtual for info in ranks) else ""
        names = [f"rank {info.rank}" + (" (virtual)" if info.virtual and not virtual else "") for info in ranks]
        self._size = len(ranks)
        self._names = names
        self._sent: dict[str, Any] = {}
        self.figure = LiveFigure(data=_traces(names), layout=_layout(virtual))

    def update(self, now: Sequence[Reading | None], seen: Series, marks: Sequence[Mark]) -> None:
        """Draw this, in one message to the browser."""
        readings = [reading or Reading(0, 0, None, None, None, None) for reading in now]
        limits = [reading.limit for reading in readings]
        top = max([0, *(reading.live_peak for reading in readings), *(reading.reserved or 0 for reading in readings)])
        top = max(top, int(seen.peak.max(initial=0)))
        unit, per_unit = ("GiB", 2**30) if top >= 2**31 else ("MiB", 2**20)
        bars = [
            [math.nan if reading is None else _in(value, per_unit) for value, reading in zip(values, now, strict=True)]
            for values in (
                [reading.reserved for reading in readings],
                [reading.live_peak for reading in readings],
                [reading.live for reading in readings],
                limits,
            )
        ]
        peak, milliseconds = seen.peak / per_unit, seen.seconds * 1000
        y = [*map(np.array, bars), *peak, *seen.speed, seen.loss, *milliseconds]
        x = [self._names] * len(bars) + [seen.step] * (3 * self._size + 1)
        known = sorted({limit for limit in limits if limit is not None})
        layout = _memory_axes(top, known, unit, per_unit) | _drawn(marks, top, known, per_unit)
        changed = {name: value for name, value in layout.items() if self._sent.get(name) != value}
        self._sent = layout
        self.figure.plotly_update({"x": x, "y": y}, changed)


def _in(value: int | None, per_unit: int) -> float:
    return math.nan if value is None else value / per_unit


def _traces(names: Sequence[str]) -> list[go.Bar | go.Scatter]:
    none: Array = np.empty(0)
    bar: dict[str, Any] = {"xaxis": "x", "yaxis": "y", "legend": "legend2", "hovertemplate": "%{y:.1f}"}
    traces: list[go.Bar | go.Scatter] = [
        go.Bar(name="reserved", width=0.8, marker={"color": "rgba(136,136,136,0.35)"}, **bar),
        go.Bar(name="live peak", width=0.56, marker={"color": SKY}, **bar),
        go.Bar(name="live", width=0.3, marker={"color": BLUE}, **bar),
        go.Scatter(
            name="limit",
            mode="markers",
            marker={"symbol": "line-ew", "size": 36, "line": {"width": 4, "color": VERMILION}},
            **bar,
        ),
    ]
    for axes, decimals in (("2", ".1f"), ("3", ".0f")):
        traces += [_line(name, rank, axes, decimals, axes == "2") for rank, name in enumerate(names)]
    loss = {"color": GREY, "width": 3}
    traces.append(go.Scatter(name="loss", x=none, y=none, xaxis="x4", yaxis="y4", line=loss, showlegend=False))
    return traces + [_line(name, rank, "5", ".1f", False) for rank, name in enumerate(names)]


def _line(name: str, rank: int, axes: str, decimals: str, in_legend: bool) -> go.Scatter:
    colours, dashes = len(RANK_COLOURS), len(DASHES)
    look = {"color": RANK_COLOURS[rank % colours], "dash": DASHES[(rank + rank // colours) % dashes], "width": 3}
    return go.Scatter(
        name=name,
        legendgroup=name,
        showlegend=in_legend,
        mode="lines",
        line=look,
        xaxis=f"x{axes}",
        yaxis=f"y{axes}",
        hovertemplate=f"step %{{x}}: %{{y:{decimals}}}",
    )


def _layout(virtual: str) -> dict[str, Any]:
    left, middle, right = _COLUMNS
    places = {
        "": (left, _UPPER),
        "2": ((middle[0], right[1]), _UPPER),
        "3": (left, _LOWER),
        "4": (middle, _LOWER),
        "5": (right, _LOWER),
    }
    layout: dict[str, Any] = {}
    for axes, (across, up) in places.items():
        step = {"title": {"text": "optimizer step", "standoff": 2}, "tickformat": "d"} if axes else {}
        matches = {"matches": "x2"} if axes in _OVER_TIME[1:] else {}
        layout[f"xaxis{axes}"] = {"domain": across, "anchor": f"y{axes}", "showgrid": False, **step, **matches}
        layout[f"yaxis{axes}"] = {"domain": up, "anchor": f"x{axes}", "rangemode": "tozero", "gridcolor": GREY}
    legend = {"orientation": "h", "yanchor": "bottom", "y": _UPPER[1], "bgcolor": "rgba(0,0,0,0)"}
    return layout | {
        "height": HEIGHT_PX,
        "margin": {"l": 50, "r": 12, "t": 8, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 14},
        "barmode": "overlay",
        "dragmode": False,
        "uirevision": "kept",
        "legend": legend | {"x": middle[0]},
        "legend2": legend | {"x": left[0]},
        "annotations": _titles("MiB", virtual),
        "meta": virtual,
    }


def _titles(unit: str, virtual: str) -> list[dict[str, Any]]:
    left, middle, right = _COLUMNS
    texts = (
        (f"VRAM now, {unit}{virtual}", left[0], 1.0),
        (f"VRAM: live peak of each step, {unit}{virtual}", middle[0], 1.0),
        ("Throughput, samples/s per rank", left[0], _LOWER[1] + 0.01),
        ("Loss, mean of ranks", middle[0], _LOWER[1] + 0.01),
        ("Step time, ms", right[0], _LOWER[1] + 0.01),
    )
    return [
        {"text": f"<b>{text}</b>", "x": x, "y": y, "xref": "paper", "yref": "paper", "showarrow": False}
        | {"xanchor": "left", "yanchor": "top" if y == 1.0 else "bottom", "font": {"size": 17}}
        for text, x, y in texts
    ]


def _memory_axes(top: int, limits: Sequence[int], unit: str, per_unit: int) -> dict[str, Any]:
    shown = [limit for limit in limits if limit <= top * _LIMIT_IN_SIGHT]
    highest = max([top * 1.3, *(limit * 1.1 for limit in shown)]) / per_unit or 1.0
    return {"yaxis.range": [0, highest], "yaxis2.range": [0, highest]}


def _drawn(marks: Sequence[Mark], top: int, limits: Sequence[int], per_unit: int) -> dict[str, Any]:
    return {}
