"""Shared parts of figures that stay in a saved notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display
from plotly import graph_objects as go
from plotly.io import renderers

from .style import TEXT

GRID = "rgba(136,136,136,0.3)"


def show(figures: Sequence[go.Figure]) -> None:
    """Show them in a notebook."""
    for figure in figures:
        # Drawn by the extension that is installed with plotly: nothing is fetched, and the library is not saved.
        bundle = renderers["plotly_mimetype"].to_mimebundle(figure.to_dict())
        display(bundle | {"text/plain": figure.layout.title.text}, raw=True)


def can_show() -> bool:
    """Return whether this is a notebook: a terminal gets text only."""
    return getattr(get_ipython(), "kernel", None) is not None


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
