"""The plotly figure of the panel before anything is drawn: its traces, axes and legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plotly import graph_objects as go

from .style import BLUE, DASHES, GREY, RANK_COLOURS, SKY, VERMILION

HEIGHT_PX = 620
COLUMNS = ((0.0, 0.29), (0.36, 0.65), (0.72, 1.0))  # where they begin and end, of the figure's width
UPPER, LOWER = (0.55, 0.9), (0.04, 0.4)
OVER_TIME = ("2", "3", "4", "5")  # the axes whose x is the optimizer step


class LiveFigure(go.FigureWidget):  # type: ignore[misc]
    """A figure that a page which is loaded again shows as it is now; plotly's own tells what it was at first."""

    _complete = False

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._complete = True

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """What the browser is told; everything when it asks for everything."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if key is None and self._complete:
            to_json = self.trait_metadata("_widget_data", "to_json")
            state["_widget_data"] = to_json(self._data, self)
            state["_widget_layout"] = to_json(self._layout_obj._props, self)
        return state


def make_figure(names: Sequence[str]) -> LiveFigure:
    """Four traces for the bars, then peak and throughput of each rank, the loss, and the step time of each rank."""
    traces = [*_bars(), *_lines(names, "2", ".1f"), *_lines(names, "3", ".0f"), _loss(), *_lines(names, "5", ".1f")]
    return LiveFigure(data=traces, layout=_layout())


def _bars() -> list[Any]:
    place = {"xaxis": "x", "yaxis": "y", "legend": "legend2", "hovertemplate": "%{y:.1f}"}
    limit = {"symbol": "line-ew", "size": 36, "line": {"width": 4, "color": VERMILION}}
    return [
        go.Bar(name="reserved", width=0.8, marker={"color": "rgba(136,136,136,0.4)"}, **place),
        go.Bar(name="live peak", width=0.56, marker={"color": SKY}, **place),
        go.Bar(name="live", width=0.3, marker={"color": BLUE}, **place),
        go.Scatter(name="limit", mode="markers", marker=limit, **place),
    ]


def _lines(names: Sequence[str], axes: str, decimals: str) -> list[Any]:
    colours, dashes = len(RANK_COLOURS), len(DASHES)
    return [
        go.Scatter(
            name=name,
            legendgroup=name,
            showlegend=axes == "2",
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
    legend = {"orientation": "h", "yanchor": "bottom", "y": UPPER[1], "bgcolor": "rgba(0,0,0,0)"}
    return layout | {
        "height": HEIGHT_PX,
        "autosize": True,
        "margin": {"l": 48, "r": 12, "t": 8, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 14},
        "barmode": "overlay",
        "dragmode": False,
        "legend": legend | {"x": right[1], "xanchor": "right"},
        "legend2": legend | {"x": left[0] - 0.02, "xanchor": "left"},
    }
