"""Plots of predicted against measured values, drawn by plotly in Chromium."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tests.browser.lab import browser, chromium

FOLDER = Path(__file__).parents[2] / "docs" / "plots"
WIDTH, HEIGHT = 480, 460  # of one panel, in pixels
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito's, told apart by colour-blind people too
SYMBOLS = ("circle", "diamond-open", "cross-thin-open", "square-open")


@dataclass(frozen=True)
class Point:
    """One prediction, with its error bar where there is one, and what came."""

    measured: float
    predicted: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One panel: points by the name of their group; ``within`` is the share that the grey band shows."""

    title: str
    unit: str
    within: float
    groups: Mapping[str, Sequence[Point]]


def draw(name: str, comparisons: Sequence[Comparison]) -> str:
    """Write ``docs/plots/NAME.png`` and return the Markdown that shows it; none without a Chromium to draw it with."""
    executable = chromium()
    if executable is None:
        print(f"{name}.png was not drawn: no chromium was found; name one with CHROMIUM=/path/to/it.")
        return ""
    FOLDER.mkdir(exist_ok=True)
    width = WIDTH * len(comparisons)
    page_text = figure(comparisons).to_html(include_plotlyjs=True, config={"staticPlot": True})
    with browser(executable) as chrome:
        page = chrome.new_page(viewport={"width": width, "height": HEIGHT})
        page.set_content(page_text.replace("<body>", '<body style="margin: 0">'))
        page.locator(".main-svg").first.wait_for()
        page.screenshot(path=FOLDER / f"{name}.png")
    print(FOLDER / f"{name}.png")
    return f"\n![Predicted against measured](plots/{name}.png)\n"


def figure(comparisons: Sequence[Comparison]) -> go.Figure:
    """The panels side by side, on logarithmic axes that are alike in both directions."""
    titles = [f"{one.title} (grey: within {100 * one.within:.0f} %)" for one in comparisons]
    drawn = make_subplots(1, len(comparisons), subplot_titles=titles)
    for column, comparison in enumerate(comparisons, 1):
        _add(drawn, column, comparison)
    drawn.update_layout(
        template="plotly_white",
        width=WIDTH * len(comparisons),
        height=HEIGHT,
        margin={"l": 60, "r": 15, "t": 40, "b": 80},
        legend={"orientation": "h", "y": -0.18},
        showlegend=max(len(one.groups) for one in comparisons) > 1,
    )
    return drawn


def _add(drawn: go.Figure, column: int, comparison: Comparison) -> None:
    values = [size for points in comparison.groups.values() for p in points for size in (p.measured, p.predicted)]
    ends = [min(values) / 1.3, max(values) * 1.3]
    band = [
        *(size * (1 - comparison.within) for size in ends),
        *(size * (1 + comparison.within) for size in ends[::-1]),
    ]
    place = {"row": 1, "col": column}
    line = {"mode": "lines", "showlegend": False, **place}
    grey = {"fill": "toself", "fillcolor": "rgba(128,128,128,0.25)", "line": {"width": 0}}
    drawn.add_scatter(x=[*ends, *ends[::-1]], y=band, **grey, **line)
    drawn.add_scatter(x=ends, y=ends, line={"color": "#888", "width": 1}, **line)
    for (group, points), color, symbol in zip(comparison.groups.items(), COLORS, SYMBOLS, strict=False):
        drawn.add_scatter(
            x=[point.measured for point in points],
            y=[point.predicted for point in points],
            error_y=_bars(points),
            mode="markers",
            marker={"color": color, "symbol": symbol, "size": 7},
            name=group,
            legendgroup=group,
            showlegend=all(trace.name != group for trace in drawn.data),
            **place,
        )
    axis = {"type": "log", "dtick": "D2", "tickformat": ",~g"}
    drawn.update_xaxes(title=f"measured, {comparison.unit}", **axis, **place)
    drawn.update_yaxes(title=f"predicted, {comparison.unit}", **axis, **place)


def _bars(points: Sequence[Point]) -> dict[str, object]:
    if any(point.low is None or point.high is None for point in points):
        return {"visible": False}
    return {
        "symmetric": False,
        "array": [(point.high or 0) - point.predicted for point in points],
        "arrayminus": [point.predicted - (point.low or 0) for point in points],
        "thickness": 1,
        "width": 0,
    }
