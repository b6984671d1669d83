"""The charts of two runs over each other: loss, throughput and memory since the flip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from IPython.display import display
from plotly import graph_objects as go

from ..report.runs import Row
from ..report.runs.comparing import Comparison
from . import figures
from .style import BLUE, ORANGE

_LOOKS = ((BLUE, "solid"), (ORANGE, "dash"))  # told apart without colours, too
_GAP = 0.1  # of the height, between two charts
_MIB, _GIB = 2**20, 2**30


def show_comparison(comparison: Comparison) -> None:
    """Show the tables, and in a notebook the charts below them."""
    if not figures.can_show():
        print(comparison)
        return
    display({"text/html": comparison._repr_html_(), "text/plain": str(comparison)}, raw=True)
    if any(len(row.curve) for row in (comparison.a, comparison.b)):
        figures.show([comparison_figure(comparison.a, comparison.b)])


def comparison_figure(a: Row, b: Row) -> go.Figure:
    """Three charts, one below the other; each run counts its samples and steps from its own flip."""
    unit, size = ("GiB", _GIB) if max([*a.curve.live_peaks, *b.curve.live_peaks, 0]) >= 2 * _GIB else ("MiB", _MIB)
    charts: Sequence[tuple[str, str, Callable[[Row], Any], Callable[[Row], Any]]] = (
        ("loss", "samples of all ranks since the flip", lambda r: r.curve.samples, lambda r: r.curve.losses),
        ("samples/s", "", lambda r: r.curve.steps, lambda r: r.curve.rates),
        (
            f"live peak, {unit}",
            "steps since the flip",
            lambda r: r.curve.steps,
            lambda r: [live / size for live in r.curve.live_peaks],
        ),
    )
    figure = go.Figure()
    height = (1 - _GAP * len(charts)) / len(charts)
    for place, (title, below, x, y) in enumerate(charts):
        axis = str(place + 1) if place else ""
        top = 1 - place * (height + _GAP) - (_GAP / 2 if place else 0)  # the first one's own x axis takes room
        for row, (colour, dash) in zip((a, b), _LOOKS, strict=True):
            figure.add_scatter(
                x=list(x(row)),
                y=list(y(row)),
                name=f"run {row.number}",
                legendgroup=str(row.key),
                showlegend=place == 0,
                mode="lines+markers" if len(row.curve) < 3 else "lines",
                line={"color": colour, "dash": dash, "width": 2},
                xaxis=f"x{axis}",
                yaxis=f"y{axis}",
                hovertemplate=f"run {row.number}, {title}: %{{y:.5g}}",
            )
        common = {"gridcolor": figures.GRID, "zeroline": False}
        figure.layout[f"xaxis{axis}"] = common | {
            "anchor": f"y{axis}",
            "title": {"text": below, "standoff": 2, "font": {"size": 13}},
            "showticklabels": bool(below),
        }
        figure.layout[f"yaxis{axis}"] = common | {
            "anchor": f"x{axis}",
            "domain": [max(0.0, top - height), top],
            "title": {"text": title, "standoff": 4, "font": {"size": 13}},
            "rangemode": "tozero" if place else "normal",
            "nticks": 4,
        }
    figure.layout["xaxis2"]["matches"] = "x3"
    figure.update_layout(
        **figures.look(f"Run {a.number} and run {b.number} since their flips", 560),
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
        hovermode="x",
    )
    return figure
