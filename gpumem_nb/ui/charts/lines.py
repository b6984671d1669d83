"""A line that several charts draw."""

from __future__ import annotations

from typing import Any


def straight_line(
    xref: str, x: tuple[float, float], yref: str, y: tuple[float, float], colour: str, dash: str, width_px: int
) -> dict[str, Any]:
    """Return a shape from ``x[0], y[0]`` to ``x[1], y[1]``."""
    ends = {"xref": xref, "x0": x[0], "x1": x[1], "yref": yref, "y0": y[0], "y1": y[1]}
    return {"type": "line", **ends, "line": {"color": colour, "dash": dash, "width": width_px}}
