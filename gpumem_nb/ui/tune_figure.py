"""Throughput against reserved memory of everything that tuning measured, as a figure that stays in a saved notebook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plotly import graph_objects as go

from ..internals.plotly_internals import LiveFigure
from ..planning.tuning.record import Candidate
from ..planning.tuning.result import TuneResult
from ..shared.units import format_rate
from . import figures
from .style import BLUE, GREEN, GREY, VERMILION

_MIB = 2**20
_HEIGHT = 380
_NEAR = 1.6  # times the most that was reserved, up to which the limit is worth its place
_HOVER = "%{text}<br>%{x:.1f} MiB reserved, %{customdata} samples/s<extra></extra>"


def show_tuned(result: TuneResult) -> None:
    """Show the figure; there is none in a terminal, or where nothing was measured."""
    if figures.can_show() and result.measured:
        figures.show([tuned_figure(result)])


def tuned_widget(result: TuneResult) -> Any:
    """Return the same in a panel."""
    figure = tuned_figure(result)
    return LiveFigure(data=figure.data, layout=figure.layout)


def tuned_figure(result: TuneResult) -> go.Figure:
    """MiB reserved on the worst rank, and samples/s of all ranks with their standard errors; hover says the flip."""
    front, best, now = result.pareto(), result.best, result.now
    others = [one for one in result.measured if one not in front]
    marked = [("present settings", now, "square", GREY, 20), ("best", best, "circle", GREEN, 16)]
    figure = go.Figure(
        [
            _points("others", others, result, mode="markers", opacity=0.35, marker={"color": GREY, "size": 8}),
            _points(
                "no other is faster with as little memory",
                front,
                result,
                mode="lines+markers",
                line={"color": BLUE, "width": 2, "shape": "hv"},
                marker={"color": BLUE, "size": 9},
            ),
            *(
                _points(
                    name,
                    [one],
                    result,
                    mode="markers",
                    marker={
                        "color": "rgba(0,0,0,0)",
                        "size": size,
                        "symbol": symbol,
                        "line": {"color": colour, "width": 3},
                    },
                )
                for name, one, symbol, colour, size in marked
                if one
            ),
        ]
    )
    figure.update_layout(
        **figures.look("Samples/s against reserved memory, as measured", _HEIGHT),
        xaxis={
            "title": {"text": "MiB reserved, worst rank", "standoff": 4, "font": {"size": 14}},
            "gridcolor": figures.GRID,
            "zeroline": False,
            "rangemode": "tozero",
        },
        yaxis={
            "title": {"text": "samples/s, all ranks", "font": {"size": 14}},
            "gridcolor": figures.GRID,
            "zeroline": False,
            "rangemode": "tozero",
        },
        legend={"orientation": "h", "y": -0.22, "yanchor": "top", "font": {"size": 13}},
    )
    figure.update_layout(margin={"b": 96})
    most = max(one.predicted.reserved_peak_bytes for one in result.measured)
    if result.budget_bytes and result.budget_bytes < _NEAR * most:
        figure.add_vline(
            x=result.budget_bytes / _MIB,
            line={"color": VERMILION, "width": 3},
            annotation={"text": "limit", "font": {"color": VERMILION}, "xanchor": "right"},
        )
    return figure


def _points(name: str, of: Sequence[Candidate], result: TuneResult, **look: Any) -> Any:
    return go.Scatter(
        name=name,
        x=[one.predicted.reserved_peak_bytes / _MIB for one in of],
        y=[one.samples_per_s for one in of],
        error_y={
            "type": "data",
            "array": [None if math.isnan(one.error) else one.error for one in of],
            "thickness": 1,
            "width": 3,
        },
        text=[result.flip(one) for one in of],
        customdata=[format_rate(one.samples_per_s) for one in of],
        hovertemplate=_HOVER,
        **look,
    )
