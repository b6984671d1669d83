"""Marks where something happened: lines through every chart over steps, and their labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..series import Mark
from ..style import GREY, VERMILION
from .chart import Axes
from .lines import straight_line
from .view import View

_LABEL_LEVELS = 4  # labels that would cover each other go below each other
_LETTER_WIDTH = 0.0125  # of a letter in a label, in widths of the chart; about 7 of 560 pixels


def mark_lines(view: View, over_steps: Sequence[Axes]) -> list[dict[str, Any]]:
    """A vertical line through each chart for each mark."""
    return [
        straight_line(axes.x, (mark.step,) * 2, f"{axes.y} domain", (0, 1), *_look(mark))
        for mark in view.marks
        for axes in over_steps
    ]


def mark_labels(view: View, axes: Axes) -> list[dict[str, Any]]:
    """Labels at the top of a wide chart, each on the level where it covers least of the others."""
    steps = view.series.step
    first, last = (steps[0], steps[-1]) if steps.size else (0.0, 0.0)
    place = {"xref": axes.x, "yref": f"{axes.y} domain", "yanchor": "top", "showarrow": False}
    look = {"font": {"size": 13}, "bgcolor": "white", "borderpad": 0}  # the style sheet has the theme's colour for it
    taken_to = [-1.0] * _LABEL_LEVELS
    labels = []
    for mark in view.marks:
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
