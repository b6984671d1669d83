"""Marks where something happened: lines through every chart over steps, and their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..series import Mark
from ..style import GREY, VERMILION
from .chart import Axes
from .lines import straight_line
from .view import View

_LEVELS = 3  # numbers that would cover each other go below each other
_WIDTH = 0.08  # of a number, in widths of the chart: two digits where it is 300 pixels wide
_LEVEL_HEIGHT = 0.13


def mark_lines(view: View, over_steps: Sequence[Axes]) -> list[dict[str, Any]]:
    """Return a vertical line through each chart for each mark."""
    return [
        straight_line(axes.x, (mark.step,) * 2, f"{axes.y} domain", (0, 1), *_look(mark))
        for mark in view.marks
        for axes in over_steps
    ]


def mark_labels(view: View, axes: Axes) -> list[dict[str, Any]]:
    """Return the marks' numbers at the top of a wide chart, newest first, each on a level where it covers no other.

    One that has no place is left out: its line is there, and the key under the charts says its step.
    """
    steps = view.series.step
    first, last = (steps[0], steps[-1]) if steps.size else (0.0, 0.0)
    place = {"xref": axes.x, "yref": f"{axes.y} domain", "xanchor": "center", "yanchor": "top", "showarrow": False}
    taken_from = [math.inf] * _LEVELS
    labels = []
    for mark in reversed(view.marks):
        at = (mark.step - first) / max(1.0, last - first)
        level = next((level for level, begin in enumerate(taken_from) if at + _WIDTH <= begin), None)
        if level is None:
            continue
        taken_from[level] = at
        # The style sheet has the theme's colour for the background.
        look = {"bgcolor": "white", "borderpad": 1, "bordercolor": _look(mark)[0]}
        labels.append({"text": f"<b>{mark.number}</b>", "x": mark.step, "y": 1 - _LEVEL_HEIGHT * level} | place | look)
    return labels


def _look(mark: Mark) -> tuple[str, str, int]:
    return (VERMILION, "solid", 2) if mark.bad else (GREY, "dot", 2)
