"""Figures that stay in a saved notebook: two runs over each other, one step of all ranks, what tuning measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from IPython.display import display
from plotly import graph_objects as go
from plotly.io import renderers

from ..internals.plotly_internals import LiveFigure
from ..planning.ladder import Ladder
from ..planning.tuning.record import Candidate
from ..planning.tuning.result import TuneResult
from ..report.runs import Row
from ..report.runs.comparing import Comparison
from ..shared.knobs import CHANGES
from ..shared.step_times import MEANING, PARTS, Lap, StepLanes
from ..shared.units import format_rate
from .cells import in_notebook
from .style import BLUE, GREEN, GREY, ORANGE, TEXT, TIME_COLOURS, VERMILION

GRID = "rgba(136,136,136,0.3)"


def show(figures: Sequence[go.Figure]) -> None:
    """Show them in a notebook."""
    for figure in figures:
        # Drawn by the extension that is installed with plotly: nothing is fetched, and the library is not saved.
        bundle = renderers["plotly_mimetype"].to_mimebundle(figure.to_dict())
        display(bundle | {"text/plain": figure.layout.title.text}, raw=True)


def look(title: str, height: int) -> dict[str, Any]:
    """Return the layout's part that all of them share."""
    return {
        "title": {"text": title, "font": {"size": 16}, "x": 0.01, "xanchor": "left"},
        "height": height,
        "font": {"color": TEXT, "size": 14},
        "margin": {"l": 56, "r": 10, "t": 44, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }


_LOOKS = ((BLUE, "solid"), (ORANGE, "dash"))  # told apart without colours, too
_GAP = 0.1  # of the height, between two charts
_MIB, _GIB = 2**20, 2**30


def show_comparison(comparison: Comparison) -> None:
    """Show the tables, and in a notebook the charts below them."""
    if not in_notebook():
        print(comparison)
        return
    display({"text/html": comparison._repr_html_(), "text/plain": str(comparison)}, raw=True)
    if any(len(row.curve) for row in (comparison.a, comparison.b)):
        show([comparison_figure(comparison.a, comparison.b)])


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
        common = {"gridcolor": GRID, "zeroline": False}
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
        **look(f"Run {a.number} and run {b.number} since their flips", 560),
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
        hovermode="x",
    )
    return figure


_LANE_PX, _ABOVE_PX, _BELOW_PX = 44, 44, 96
_LEGEND_PX = 52  # below the lanes
_WAITING, _REDUCED = "gradients that not all ranks have sent yet", "gradients on their way"
_OPACITY = {_WAITING: 0.25, _REDUCED: 0.6}


def show_lanes(lanes: Sequence[StepLanes]) -> None:
    """Show the figure; a terminal gets none."""
    if in_notebook():
        show([lanes_figure(lanes)])


def lanes_figure(lanes: Sequence[StepLanes]) -> go.Figure:
    """Milliseconds since the first of the ranks began the step, the first rank on top."""
    first_s = min(lane.parts[0].began_s for lane in lanes)
    traces = [_boxes(part, TIME_COLOURS[part], lanes, first_s) for part in PARTS]
    traces += _flights(lanes, first_s)
    figure = go.Figure([trace for trace in traces if trace.x])
    last = max(lane.step for lane in lanes)
    lanes_px = _LANE_PX * len(lanes)
    figure.update_layout(
        **look(f"Step {last} of each rank", _ABOVE_PX + lanes_px + _BELOW_PX),
        barmode="overlay",
        xaxis={"title": {"text": "ms", "standoff": 2, "font": {"size": 14}}, "gridcolor": GRID},
        yaxis={
            "autorange": "reversed",
            "tickvals": [lane.rank for lane in lanes],
            "ticktext": [f"rank {lane.rank}" for lane in lanes],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
        },
        legend={"font": {"size": 13}, "orientation": "h", "yanchor": "top", "y": -_LEGEND_PX / lanes_px},
    )
    figure.update_layout(margin={"t": _ABOVE_PX, "b": _BELOW_PX})
    return figure


def _boxes(part: str, colour: str, lanes: Sequence[StepLanes], first_s: float) -> Any:
    found = [(lane.rank, lap) for lane in lanes for lap in lane.parts if lap.name == part]
    hover = f"{part}: %{{customdata[1]:.2f}} ms ({MEANING[part]})<extra></extra>"
    return _bar(part, colour, found, first_s, hover, offset=-0.3, width=0.6)


def _flights(lanes: Sequence[StepLanes], first_s: float) -> list[Any]:
    """Horovod negotiates a bucket until all ranks have sent it, and reduces it then."""
    last_s: dict[int | None, float] = {}
    for lane in lanes:
        for lap in lane.transfers:
            last_s[lap.bucket] = max(last_s.get(lap.bucket, lap.began_s), lap.began_s)
    halves: dict[str, list[tuple[int, Lap]]] = {_WAITING: [], _REDUCED: []}
    for lane in lanes:
        for lap in lane.transfers:
            all_sent_s = min(last_s[lap.bucket], lap.ended_s)
            if all_sent_s > lap.began_s:
                halves[_WAITING].append((lane.rank, replace(lap, ended_s=all_sent_s)))
            halves[_REDUCED].append((lane.rank, replace(lap, began_s=all_sent_s)))
    hover = {
        _WAITING: "%{customdata[0]} wait for a rank that has not sent its own yet: %{customdata[1]:.2f} ms",
        _REDUCED: "%{customdata[0]} on their way, sent by all ranks: %{customdata[1]:.2f} ms",
    }
    return [
        _bar(name, GREY, found, first_s, f"{hover[name]}<extra></extra>", offset=0.32, width=0.14)
        for name, found in halves.items()
    ]


def _bar(
    name: str, colour: str, found: Sequence[tuple[int, Lap]], first_s: float, hover: str, offset: float, width: float
) -> Any:
    return go.Bar(
        name=name,
        orientation="h",
        y=[rank for rank, _ in found],
        base=[1000 * (lap.began_s - first_s) for _, lap in found],
        x=[1000 * (lap.ended_s - lap.began_s) for _, lap in found],
        customdata=[(lap.name, 1000 * (lap.ended_s - lap.began_s)) for _, lap in found],  # x is where a box ends
        offset=offset,
        width=width,
        marker={"color": colour, "line": {"width": 0}, "opacity": _OPACITY.get(name, 1)},
        hovertemplate=hover,
    )


_HEIGHT = 380
_TUNED_BELOW_PX = 128  # ticks, title, and a legend of four lines, as a narrow panel breaks it
_NEAR = 1.6  # times the most that was reserved, up to which the limit is worth its place
_HOVER = "%{text}<br>%{x:.1f} MiB reserved, %{customdata} samples/s<extra></extra>"


def show_tuned(result: TuneResult) -> None:
    """Show the figure; there is none in a terminal, or where nothing was measured."""
    if in_notebook() and result.measured:
        show([tuned_figure(result)])


def show_ladder(ladder: Ladder) -> None:
    """Show the figure; there is none in a terminal, or where fewer than two of its settings were timed."""
    if in_notebook() and len([one for one in (ladder.now, *ladder.rungs) if one.samples_per_s]) > 1:
        show([ladder_figure(ladder)])


def ladder_figure(ladder: Ladder) -> go.Figure:
    """Samples/s of all ranks, and MiB reserved on the worst rank, from rung to rung; hover says what a rung adds."""
    rungs = [(row, one) for row, one in zip(ladder.records, (ladder.now, *ladder.rungs), strict=True) if one.step_s]
    differs = [row["mathematics"] == CHANGES for row, _ in rungs]
    figure = go.Figure(
        go.Scatter(
            x=[one.samples_per_s for _, one in rungs],
            y=[one.reserved_peak_bytes / _MIB for _, one in rungs],
            mode="lines+markers+text",
            text=[f"{row['rung']}{' ≠' * other}" for (row, _), other in zip(rungs, differs, strict=True)],
            textposition="top right",
            hovertext=[row["adds"] for row, _ in rungs],
            hovertemplate="%{hovertext}<br>%{y:.1f} MiB reserved, %{x:.4g} samples/s<extra></extra>",
            line={"color": GREY, "width": 1},
            marker={
                "size": 11,
                "color": [ORANGE if other else BLUE for other in differs],
                "symbol": ["diamond" if other else "circle" for other in differs],
            },
        )
    )
    figure.update_layout(
        **look("Memory ladder: rungs by number, ≠ changes the mathematics", _HEIGHT),
        xaxis=_axis("samples/s, all ranks", standoff=4),
        yaxis=_axis("MiB reserved, worst rank"),
    )
    limit, most = ladder.now.limit_bytes, max(one.reserved_peak_bytes for _, one in rungs)
    if limit and limit < _NEAR * most:
        _mark_limit(figure.add_hline, y=limit / _MIB)
    return figure


def _axis(title: str, **of_title: Any) -> dict[str, Any]:
    of_title |= {"text": title, "font": {"size": 14}}
    return {"title": of_title, "gridcolor": GRID, "zeroline": False, "rangemode": "tozero"}


def _mark_limit(add: Callable[..., Any], **where: float) -> None:
    line = {"color": VERMILION, "width": 3}
    add(**where, line=line, annotation={"text": "limit", "font": {"color": VERMILION}, "xanchor": "right"})


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
        **look("Samples/s against reserved memory", _HEIGHT),
        xaxis=_axis("MiB reserved, worst rank", standoff=4),
        yaxis=_axis("samples/s, all ranks"),
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "font": {"size": 13}},
    )
    figure.update_layout(margin={"b": _TUNED_BELOW_PX})
    most = max(one.predicted.reserved_peak_bytes for one in result.measured)
    if result.budget_bytes and result.budget_bytes < _NEAR * most:
        _mark_limit(figure.add_vline, x=result.budget_bytes / _MIB)
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
