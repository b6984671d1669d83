"""The plotly figure of the panel before anything is drawn: its traces, axes and legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plotly import graph_objects as go

from ..internals.plotly_internals import LiveFigure
from .style import DASHES, GREY, LOOKS, RANK_COLOURS, UNKNOWN, VERMILION

HEIGHT_PX = 740
COLUMNS = ((0.0, 0.29), (0.36, 0.65), (0.72, 1.0))  # where they begin and end, of the figure's width
UPPER, LOWER = (0.43, 0.91), (0.04, 0.31)
OVER_TIME = ("2", "3", "4", "5")  # the axes whose x is the optimizer step


def make_figure(names: Sequence[str], real: bool) -> LiveFigure:
    """Stacks and what belongs beside them, bands with the lines of peaks, then throughput, loss and step time.

    ``names`` are those of the lines; only of ``real`` GPUs more is in use than their allocator has reserved.
    """
    lines = [*_peak_lines(names), *_lines(names, "3", ".0f"), _loss(), *_lines(names, "5", ".1f")]
    return LiveFigure(data=[*_stacks(), *_truths(real), *_bands(), *lines], layout=_layout())


def _stacks() -> list[Any]:
    """A trace for each category with its share of the ranks' peaks, and one for peaks that were not recorded."""
    looks = LOOKS | {"categories not known yet": UNKNOWN}
    return [
        go.Bar(
            name=name,
            width=0.5,
            marker={
                "color": look.colour,
                "line": {"width": 0},
                **({"pattern": look.filling} if look.pattern else {}),
            },
            xaxis="x",
            yaxis="y",
            showlegend=False,
            hovertemplate="%{y:.1f}",
        )
        for name, look in looks.items()
    ]


def _truths(real: bool) -> list[Any]:
    """What else is known of each rank's memory: around the stack and across it."""
    place = {"xaxis": "x", "yaxis": "y", "legend": "legend2", "hovertemplate": "%{y:.1f}"}
    across = {"symbol": "line-ew", "size": 36}
    spot = {"symbol": "circle", "size": 11, "color": "white", "line": {"width": 2, "color": "black"}}
    limit, device = across | {"line": {"width": 4, "color": VERMILION}}, across | {"line": {"width": 4, "color": GREY}}
    outline = {"color": "rgba(0,0,0,0)", "line": {"width": 2, "color": GREY}}
    return [
        go.Bar(name="reserved", width=0.7, marker=outline, **place | {"yaxis": "y6"}),
        go.Scatter(name="live now", mode="markers", marker=spot, **place),
        go.Scatter(name="device", mode="markers", marker=device, visible=real, **place),
        go.Scatter(name="limit", mode="markers", marker=limit, **place),
    ]


def _bands() -> list[Any]:
    """The worst rank's categories over steps; what a step was made of holds until the next one was recorded."""
    return [
        go.Scatter(
            name=name,
            stackgroup="peak",
            mode="lines",
            line={"shape": "hv", "width": 0, "color": look.colour},
            fillcolor=look.colour,
            fillpattern=look.filling if look.pattern else None,
            xaxis="x2",
            yaxis="y2",
            showlegend=False,
            hovertemplate="step %{x}: %{y:.1f}",
        )
        for name, look in LOOKS.items()
    ]


def _peak_lines(names: Sequence[str]) -> list[Any]:
    """Thin, and distinguished by their dashes only: the colours are those of the categories."""
    return [
        go.Scatter(
            name=name,
            legendgroup=name,
            showlegend=False,
            mode="lines",
            line={"color": GREY, "dash": DASHES[rank % len(DASHES)], "width": 1.5, "shape": "hv"},
            xaxis="x2",
            yaxis="y2",
            hovertemplate="step %{x}: %{y:.1f}",
        )
        for rank, name in enumerate(names)
    ]


def _lines(names: Sequence[str], axes: str, decimals: str) -> list[Any]:
    colours, dashes = len(RANK_COLOURS), len(DASHES)
    return [
        go.Scatter(
            name=name,
            legendgroup=name,
            showlegend=axes == "3",
            mode="lines",
            line={
                "color": RANK_COLOURS[rank % colours],
                "dash": DASHES[(rank + rank // colours) % dashes],
                "width": 3,
            },
            xaxis=f"x{axes}",
            yaxis=f"y{axes}",
            hovertemplate=f"step %{{x}}: %{{y:{decimals}}}",
        )
        for rank, name in enumerate(names)
    ]


def _loss() -> Any:
    look = {"color": GREY, "width": 3}
    return go.Scatter(name="loss", mode="lines", line=look, xaxis="x4", yaxis="y4", showlegend=False)


def _layout() -> dict[str, Any]:
    left, middle, right = COLUMNS
    places = {
        "": (left, UPPER),
        "2": ((middle[0], right[1]), UPPER),
        "3": (left, LOWER),
        "4": (middle, LOWER),
        "5": (right, LOWER),
    }
    layout: dict[str, Any] = {}
    for axes, (across, up) in places.items():
        step = (
            {"title": {"text": "optimizer step", "standoff": 2, "font": {"size": 14}}, "tickformat": "d"}
            if axes
            else {}
        )
        layout[f"xaxis{axes}"] = {"domain": across, "anchor": f"y{axes}", "showgrid": False, **step}
        layout[f"yaxis{axes}"] = {"domain": up, "anchor": f"x{axes}", "rangemode": "tozero", "gridcolor": GREY}
    # A bar of its own axis is drawn around the stack instead of on top of it.
    layout["yaxis6"] = {"overlaying": "y", "anchor": "x", "matches": "y", "visible": False}
    legend = {"orientation": "h", "yanchor": "bottom", "y": UPPER[1], "bgcolor": "rgba(0,0,0,0)"}
    return layout | {
        "height": HEIGHT_PX,
        "autosize": True,
        "margin": {"l": 48, "r": 12, "t": 8, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 14},
        "barmode": "stack",
        "dragmode": False,
        "legend": legend | {"x": 0.5, "xanchor": "center", "y": -0.05, "yanchor": "top"},
        "legend2": legend | {"x": left[0] - 0.02, "xanchor": "left"},
    }
