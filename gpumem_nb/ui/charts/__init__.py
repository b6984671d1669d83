"""The charts of the panel: one file each, a table that lists them, and the figure that is assembled from the table."""

from __future__ import annotations

from .figure import Assembly, Charts
from .view import View

__all__ = ["Assembly", "Charts", "View"]
