"""Reserved memory against the batch size, a line for each of some settings, with the limit drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from ..shared.units import format_bytes
from .style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 170, 70, 12, 8, 34  # pixels
_LOOKS = ((BLUE, ""), (ORANGE, "6 3"), (GREEN, "2 3"), (PURPLE, "8 3 2 3"), (SKY, "1 4"))
_ABOVE_LIMIT = 1.5  # of which no more is drawn


def picture(lines: Mapping[str, Mapping[int, int]], now: int, limit_bytes: int | None) -> str:
    """SVG with bytes by batch size for each name; empty without any.

    Args:
        lines: what to draw, in the order of the key, by what it is called.
        now: the present batch size.
        limit_bytes: of the rank; ``None`` without one.
    """
    sizes = sorted({size for line in lines.values() for size in line})
    if not sizes:
        return ""
    highest = max(peak for line in lines.values() for peak in line.values())
    top = min(1.05 * highest, _ABOVE_LIMIT * limit_bytes) if limit_bytes else 1.05 * highest
    first, span = math.log2(sizes[0]), max(1e-9, math.log2(sizes[-1]) - math.log2(sizes[0]))

    def x(size: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log2(size) - first) / span

    def y(peak: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - peak / top)

    floor = _HEIGHT - _BOTTOM
    parts = [f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{floor}' y2='{floor}' class='gpumem-axis'/>"]
    for size in sizes:
        parts.append(f"<text x='{x(size):.0f}' y='{floor + 15}' text-anchor='middle'>{size:,}</text>")
    parts.append(
        f"<text x='{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}' y='{_HEIGHT - 3}' text-anchor='middle'>batch_size</text>"
    )
    if limit_bytes and limit_bytes <= top:
        at = f"{y(limit_bytes):.1f}"
        parts.append(
            f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{at}' y2='{at}' stroke='{VERMILION}' stroke-width='3'/>"
        )
        parts.append(
            f"<text x='{_LEFT - 5}' y='{float(at) + 4:.1f}' text-anchor='end'>{format_bytes(limit_bytes)}</text>"
        )
    if now in sizes:
        parts.append(f"<line x1='{x(now):.1f}' x2='{x(now):.1f}' y1='{_TOP}' y2='{floor}' class='gpumem-axis'/>")
        parts.append(f"<text x='{x(now) + 4:.1f}' y='{_TOP + 11}'>now</text>")
    keys = []
    for (name, line), (colour, dashes) in zip(lines.items(), _LOOKS, strict=False):
        points = " ".join(f"{x(size):.1f},{y(peak):.1f}" for size, peak in sorted(line.items()))
        look = f"stroke='{colour}' stroke-dasharray='{dashes}' stroke-width='2.5' fill='none'"
        parts.append(f"<polyline points='{points}' {look} clip-path='url(#gpumem-batch-clip)'/>")
        sign = f"<svg width='30' height='8'><line x1='0' x2='30' y1='4' y2='4' {look}/></svg>"
        keys.append(f"<li>{sign} {escape(name)}</li>")
    clip = (
        f"<clipPath id='gpumem-batch-clip'><rect x='0' y='{_TOP}' width='{_WIDTH}' height='{floor - _TOP}'/></clipPath>"
    )
    title = "reserved memory against the batch size, the limit in red"
    return (
        f"<ul class='gpumem-key'>{''.join(keys)}</ul><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' "
        f"aria-label='{title}'><title>{title}</title>{clip}{''.join(parts)}</svg>"
    )
