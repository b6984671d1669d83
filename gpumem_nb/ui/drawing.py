"""What is written and drawn over the charts: titles, limits, and marks where something happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..shared.units import format_bytes
from .figure import COLUMNS, LOWER, OVER_TIME, UPPER
from .series import Mark
from .style import GREY, VERMILION

_LABEL_LEVELS = 4  # labels that would cover each other go below each other
_LETTER_WIDTH = 0.0125  # of a letter in a label, in widths of the chart; about 7 of 560 pixels


def titles(unit: str, virtual: str, worst: int, lines: Sequence[str]) -> list[dict[str, Any]]:
    """A title above each chart; ``virtual`` marks memory that is accounted, not a GPU's."""
    all_ranks = (
        "" if len(lines) == 1 else "; lines: all ranks" if lines[0] == "rank 0" else "; lines: highest to lowest"
    )
    left, middle, right = COLUMNS
    over_upper, over_lower = UPPER[1] + 0.045, LOWER[1] + 0.01
    places = (
        (f"VRAM peak, {unit}{virtual}", left[0], over_upper),
        (f"Peak of each step, {unit}: rank {worst}{all_ranks}", middle[0], over_upper),
        ("Samples/s of each rank", left[0], over_lower),
        ("Loss, mean of ranks", middle[0], over_lower),
        ("Step time, ms", right[0], over_lower),
    )
    place = {"xref": "paper", "yref": "paper", "showarrow": False, "xanchor": "left", "yanchor": "bottom"}
    return [{"text": f"<b>{text}</b>", "x": x, "y": y, "font": {"size": 17}, **place} for text, x, y in places]


def limit_lines(limits: Sequence[float]) -> list[dict[str, Any]]:
    """Lines across the chart of peaks; in the bars' chart each bar has its own limit."""
    return [_line("x2 domain", 0, 1, "y2", limit, limit, VERMILION, "solid", 3) for limit in limits]


def limits_out_of_sight(limits: Sequence[int], top: int) -> list[dict[str, Any]]:
    """Limits far above everything drawn, named over the bars."""
    text = ", ".join(f"{format_bytes(limit)} (at {top / limit:.0%})" for limit in limits)
    place = {"showarrow": False, "x": 1, "y": 1, "xanchor": "right", "yanchor": "top", "font": {"size": 14}}
    note = {"text": f"limit ↑ {text}", "xref": "x domain", "yref": "y domain", **place}
    return [note] if limits else []


def mark_lines(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """A line through every chart over time for each mark."""
    return [
        _line(f"x{axes}", mark.step, mark.step, f"y{axes} domain", 0, 1, *_look(mark))
        for mark in marks
        for axes in OVER_TIME
    ]


def mark_labels(marks: Sequence[Mark], first: float, last: float) -> list[dict[str, Any]]:
    """Labels at the top of the widest chart, each on the level where it covers least of the others."""
    place = {"xref": "x2", "yref": "y2 domain", "yanchor": "top", "showarrow": False}
    look = {"font": {"size": 13}, "bgcolor": "white", "borderpad": 0}  # the style sheet has the theme's colour for it
    taken_to = [-1.0] * _LABEL_LEVELS
    labels = []
    for mark in marks:
        at, width = (mark.step - first) / max(1.0, last - first), _LETTER_WIDTH * (len(mark.text) + 1)
        leftward = at + width > 1
        begin = at - width if leftward else at
        level = next((level for level, end in enumerate(taken_to) if end <= begin), taken_to.index(min(taken_to)))
        taken_to[level] = begin + width
        anchor = "right" if leftward else "left"
        labels.append({"text": mark.text, "x": mark.step, "y": 1 - 0.06 * level, "xanchor": anchor, **place, **look})
    return labels


def _look(mark: Mark) -> tuple[str, str, int]:
    return (VERMILION, "solid", 2) if mark.bad else (GREY, "dot", 2)


def _line(
    xref: str, x0: float, x1: float, yref: str, y0: float, y1: float, color: str, dash: str, width: int
) -> dict[str, Any]:
    ends = {"xref": xref, "x0": x0, "x1": x1, "yref": yref, "y0": y0, "y1": y1}
    return {"type": "line", **ends, "line": {"color": color, "dash": dash, "width": width}}
