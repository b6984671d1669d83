"""Lines that several charts draw."""

from __future__ import annotations

from typing import Any

from plotly import graph_objects as go

from ..style import DASHES, RANK_COLOURS
from .view import View


def rank_lines(view: View, decimals: int, in_legend: bool = False) -> list[Any]:
    """A trace for each of the view's lines; the names are ``in_legend`` once, for all charts that draw such lines."""
    colours, dashes = len(RANK_COLOURS), len(DASHES)
    return [
        go.Scatter(
            name=name,
            legendgroup=name,
            showlegend=in_legend,
            mode="lines",
            line={
                "color": RANK_COLOURS[rank % colours],
                "dash": DASHES[(rank + rank // colours) % dashes],
                "width": 3,
            },
            hovertemplate=f"step %{{x}}: %{{y:.{decimals}f}}",
        )
        for rank, name in enumerate(view.lines)
    ]


def straight_line(
    xref: str, x: tuple[float, float], yref: str, y: tuple[float, float], colour: str, dash: str, width_px: int
) -> dict[str, Any]:
    """A shape from ``x[0], y[0]`` to ``x[1], y[1]``."""
    ends = {"xref": xref, "x0": x[0], "x1": x[1], "yref": yref, "y0": y[0], "y1": y[1]}
    return {"type": "line", **ends, "line": {"color": colour, "dash": dash, "width": width_px}}
