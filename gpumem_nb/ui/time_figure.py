"""One step of all ranks over time: a lane for each rank, and one for its gradients on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from plotly import graph_objects as go

from ..shared.step_times import MEANING, PARTS, Lap, StepLanes
from . import figures
from .style import GREY, TIME_COLOURS

_LANE_PX, _ABOVE_PX, _BELOW_PX = 44, 44, 96
_LEGEND_PX = 52  # below the lanes
_WAITING, _REDUCED = "gradients that not all ranks have sent yet", "gradients on their way"
_OPACITY = {_WAITING: 0.25, _REDUCED: 0.6}


def show_lanes(lanes: Sequence[StepLanes]) -> None:
    """Show the figure; a terminal gets none."""
    if figures.can_show():
        figures.show([lanes_figure(lanes)])


def lanes_figure(lanes: Sequence[StepLanes]) -> go.Figure:
    """Milliseconds since the first of the ranks began the step, the first rank on top."""
    first_s = min(lane.parts[0].began_s for lane in lanes)
    traces = [_boxes(part, TIME_COLOURS[part], lanes, first_s) for part in PARTS]
    traces += _flights(lanes, first_s)
    figure = go.Figure([trace for trace in traces if trace.x])
    last = max(lane.step for lane in lanes)
    lanes_px = _LANE_PX * len(lanes)
    figure.update_layout(
        **figures.look(f"Step {last} of each rank", _ABOVE_PX + lanes_px + _BELOW_PX),
        barmode="overlay",
        xaxis={"title": {"text": "ms", "standoff": 2, "font": {"size": 14}}, "gridcolor": figures.GRID},
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
