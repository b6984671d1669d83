"""Figures of a memory report that stay in a saved notebook: one step over time, and a treemap of the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from plotly import graph_objects as go

from ..report.breakdown import by_outer_module, joined, parts, place, share
from ..report.memory import MemoryReport
from ..shared.categories import CATEGORIES
from ..shared.messages import Ledger, Span, Timeline
from ..shared.units import format_bytes, format_duration
from . import figures
from .cells import in_notebook
from .style import BLUE, LOOKS, UNKNOWN, VERMILION, Look

_MIB = 2**20
_ROOM = 1.5  # of the peak: for its label
_NAMED_AT_PEAK = 3  # categories, in the label of the peak
_SHADES = ("#b4b4b4", "#d4d4d4")  # parts of a step, in turns; black on them can be read
_BRANCH = Look("#555555")  # modules of the treemap; white on it can be read
_MOST_BOXES = 200  # of modules over time; with checkpointing each block has three
_ROOT = "peak"


def show_figures(report: MemoryReport) -> None:
    """Show the report's figures; a terminal gets its text only."""
    if not in_notebook():
        return
    drawn = []
    if timeline := report.worst_timeline:
        drawn.append(timeline_figure(timeline))
    if report.by == "module" and (worst := report.worst) and worst.ledger:
        drawn.append(treemap_figure(worst.ledger, worst.info.rank))
    figures.show(drawn)


def timeline_figure(timeline: Timeline) -> go.Figure:
    """Live bytes by category over a step's milliseconds, with its parts below and the peak labelled."""
    ends = [*timeline.time_ms, max(span.end_ms for span in timeline.spans)] if timeline.spans else timeline.time_ms
    traces = [
        _area(name, ends, timeline.live_bytes[name]) for name in CATEGORIES if any(timeline.live_bytes.get(name, ()))
    ]
    top = max(_totals(timeline), default=_MIB)
    traces += [_strip("phase", joined(timeline.spans, 0)), _strip("module", parts(timeline, _MOST_BOXES))]
    kind = " (virtual)" if timeline.ledger.virtual else ""
    title = f"Step {timeline.step} of rank {timeline.rank}: live MiB{kind}"
    took = f"ms ({format_duration(timeline.step_s)} while recorded)"
    figure = go.Figure(traces)
    figure.update_layout(
        **figures.look(title, 580),
        barmode="overlay",
        uniformtext={"minsize": 11, "mode": "hide"},  # what does not fit into its box is told on hover
        xaxis={
            "title": {"text": took, "standoff": 2, "font": {"size": 14}},
            "anchor": "y2",
            "gridcolor": figures.GRID,
            "zeroline": False,
            "range": [0, max(ends, default=1)],
        },
        yaxis={"domain": [0.3, 1], "range": [0, _ROOM * top / _MIB], "gridcolor": figures.GRID, "zeroline": False},
        yaxis2={"domain": [0, 0.26], "fixedrange": True, "showgrid": False, "zeroline": False},
        legend={"traceorder": "reversed", "font": {"size": 13}, "orientation": "h", "yanchor": "top", "y": -0.12},
        annotations=_peak(timeline, top),
    )
    return figure


def treemap_figure(ledger: Ledger, rank: int) -> go.Figure:
    """Return the peak as a tree: modules by their paths, categories within them, areas by bytes."""
    nodes = _tree(ledger)
    looks = [node["look"] for node in nodes.values()]
    sizes = [node["bytes"] for node in nodes.values()]
    figure = go.Figure(
        go.Treemap(
            ids=list(nodes),
            labels=[node["label"] for node in nodes.values()],
            parents=[node["parent"] for node in nodes.values()],
            values=sizes,
            text=[f"{format_bytes(size)}, {share(size, ledger.peak_bytes)}" for size in sizes],
            branchvalues="total",
            texttemplate="%{label}<br>%{text}",
            hovertemplate="%{id}<br>%{text}<extra></extra>",
            textfont={
                "color": ["white" if look.colour in (BLUE, _BRANCH.colour) else "black" for look in looks],
                "size": 14,
            },
            marker={
                "colors": [look.colour for look in looks],
                "pattern": {
                    "shape": [look.pattern for look in looks],
                    "bgcolor": [look.colour for look in looks],
                    "fgcolor": "rgba(0,0,0,0.25)",
                    "size": 8,
                },
                "line": {"color": "white", "width": 1},
            },
            tiling={"pad": 2},
        )
    )
    kind = " (virtual)" if ledger.virtual else ""
    figure.update_layout(
        **figures.look(
            f"Peak of rank {rank} by module: {format_bytes(ledger.peak_bytes)}{kind} in {place(ledger)}", 520
        ),
    )
    return figure


def _area(name: str, ends: Any, live: tuple[int, ...]) -> Any:
    look = LOOKS[name]
    values = [size / _MIB for size in live]
    return go.Scatter(
        name=name,
        x=ends,
        y=[*values, *values[-1:]][: len(ends)],
        stackgroup="live",
        mode="lines",
        line={"shape": "hv", "width": 0, "color": look.colour},
        fillcolor=look.colour,
        fillpattern=look.filling if look.pattern else None,
        hovertemplate=f"%{{x:.2f}} ms: {name} %{{y:.1f}} MiB<extra></extra>",
    )


def _strip(row: str, spans: Sequence[Span]) -> Any:
    """Return a row of boxes over time, each with its name where that fits."""
    return go.Bar(
        orientation="h",
        y=[row] * len(spans),
        base=[span.begin_ms for span in spans],
        x=[span.end_ms - span.begin_ms for span in spans],
        text=[getattr(span, row) for span in spans],
        # Of a box that does not begin at 0, x is where it ends.
        customdata=[(f"{span.phase} {span.module}".strip(), span.end_ms - span.begin_ms) for span in spans],
        textposition="inside",
        insidetextanchor="middle",
        marker={"color": [_SHADES[i % 2] for i in range(len(spans))], "line": {"width": 0}},
        width=0.9,
        insidetextfont={"color": "black"},
        xaxis="x",
        yaxis="y2",
        showlegend=False,
        hovertemplate="%{customdata[0]}: %{customdata[1]:.2f} ms<extra></extra>",
    )


def _totals(timeline: Timeline) -> list[int]:
    return [sum(at_once) for at_once in zip(*timeline.live_bytes.values(), strict=True)]


def _peak(timeline: Timeline, top: int) -> list[dict[str, Any]]:
    """Return an arrow to the highest point: phase, module, and what was alive."""
    ledger, totals = timeline.ledger, _totals(timeline)
    if not totals:
        return []
    at = timeline.time_ms[totals.index(top)]
    largest = sorted(ledger.at_peak.items(), key=lambda entry: -entry[1])[:_NAMED_AT_PEAK]
    alive = "<br>".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
    right = at > 0.5 * max(span.end_ms for span in timeline.spans)
    return [
        {
            "x": at,
            "y": top / _MIB,
            "text": f"<b>peak {format_bytes(ledger.peak_bytes)}</b><br>in {place(ledger)}<br>{alive}",
            "align": "right" if right else "left",
            "xanchor": "right" if right else "left",
            "yanchor": "bottom",
            "ax": -12 if right else 12,
            "ay": -14,
            "arrowcolor": VERMILION,
            "arrowwidth": 2,
            "font": {"size": 14},
        }
    ]


def _tree(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Nodes by id; a node's bytes are the sum of its children's."""
    sizes: dict[tuple[str, ...], int] = defaultdict(int)
    leaves: dict[tuple[str, ...], str] = {}
    owned = [(module, *of) for module, of_module in by_outer_module(ledger).items() for of in of_module.items()]
    for module, category, size in owned:
        if size <= 0:
            continue
        path = (_ROOT, *module.split("."), category)
        leaves[path] = category
        for depth in range(1, len(path) + 1):
            sizes[path[:depth]] += size
    return {
        "/".join(path): {
            "label": path[-1],
            "parent": "/".join(path[:-1]),
            "bytes": size,
            "look": LOOKS.get(leaves[path], UNKNOWN) if path in leaves else _BRANCH,
        }
        for path, size in sizes.items()
    }
