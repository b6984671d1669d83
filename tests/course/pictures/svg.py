"""Drawings as SVG: a white page that can be printed, with text in one size and colours that the colour-blind tell."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tests.course.notebooks import COURSE

WIDTH, HEIGHT = 760, 430
BLUE, ORANGE, GREEN, PINK, SKY, YELLOW = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"
"""Okabe and Ito's colours."""
INK, PALE = "#222222", "#888888"
Point = tuple[float, float]


class Drawing:
    """Shapes on a page of 760 × 430, drawn one above the other; written to ``notebooks/course/pictures``.

    Args:
        title: what it shows, for people who do not see it.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._shapes: list[str] = []

    def area(self, points: Sequence[Point], colour: str) -> None:
        """Fill what these points surround."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polygon points="{path}" fill="{colour}" fill-opacity="0.75"/>')

    def line(self, points: Sequence[Point], colour: str = INK, dashed: bool = False, width: float = 1.5) -> None:
        """Join these points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>')

    def text(self, at: Point, words: str, anchor: str = "start", colour: str = INK, bold: bool = False) -> None:
        """Write words, which begin, end or are centred (``middle``) at a point."""
        weight = ' font-weight="600"' if bold else ""
        x, y = at
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(words)}</text>'
        )

    def write(self, name: str) -> Path:
        """Write the file of this name."""
        page = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img" font-family="Helvetica, Arial, sans-serif" font-size="14">\n'
            f'<title>{escape(self._title)}</title>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n'
        )
        path = COURSE / "pictures" / name
        path.write_text(page + "\n".join(self._shapes) + "\n</svg>\n")
        return path
