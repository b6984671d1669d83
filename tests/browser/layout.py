"""What lies where on the page, and what covers what."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations

from .lab import TIMEOUT_S
from .panel_page import PanelPage

# Whatever shows words or numbers in the panel, each as its own box; of text that is cut off, the part that is seen.
_TEXTS = """panel => {
    const seen = [];
    const message = panel.querySelector('.gpumem-message').getBoundingClientRect();  // lies over charts on purpose
    const covered = (element, box) => message.height && element.closest('.js-plotly-plot') &&
        box.bottom > message.top && box.top < message.bottom;
    const add = (element, box) => {
        const scrolled = element.closest('.gpumem-message') ? message : { top: -Infinity, bottom: Infinity };
        const [top, bottom] = [Math.max(box.top, scrolled.top), Math.min(box.bottom, scrolled.bottom)];
        if (box.width && bottom > top && !covered(element, box))
            seen.push([element.textContent.trim().slice(0, 40), box.left, top, box.right, bottom]);
    };
    for (const text of panel.querySelectorAll('.js-plotly-plot text'))
        if (text.textContent.trim() && !text.closest('.hoverlayer')) add(text, text.getBoundingClientRect());
    for (const part of panel.querySelectorAll(
        '.gpumem-status > span, button, .widget-label, select, input, .gpumem-tiles b, .gpumem-tiles span, ' +
        '.gpumem-tip p, .gpumem-flip td:not(:has(button)), .gpumem-effect > div, .gpumem-filling p, ' +
        '.gpumem-verdict p, .gpumem-searching p, summary'))
        add(part, part.getBoundingClientRect());
    for (const plot of panel.querySelectorAll('.js-plotly-plot'))  // the highest tick may stand at the very top
        for (const axis of Object.values(plot._fullLayout).filter(one => one?._id?.startsWith('y') && one.visible)) {
            const label = [...plot.querySelectorAll(`.${axis._id}tick text`)].at(-1);
            const { left, right, width, height } = label?.getBoundingClientRect() ?? {};
            const top = plot.querySelector('.main-svg').getBoundingClientRect().top + axis._offset - height / 2;
            if (axis.type === 'linear' && label) add(label, { left, right, width, height, top, bottom: top + height });
        }
    return seen;
}"""


_REDRAWN_MS = 200


@dataclass(frozen=True)
class Box:
    """A rectangle on the page in CSS pixels, and what stands in it."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: Box, slack_px: float = 2.0) -> bool:
        """Whether both take the same place; lines of text may touch."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > slack_px and down > slack_px


def texts(panel: PanelPage) -> list[Box]:
    """Everything in the panel that is to be read or pressed."""
    return [Box(*one) for one in panel.page.locator(".gpumem-panel").last.evaluate(_TEXTS)]


def expect_tidy(panel: PanelPage) -> None:
    """The charts come to be as wide as the panel that was opened last, nothing covers anything, nothing sticks out.

    JupyterLab gives a panel its width in steps, and plotly moves words some time after it has widened the drawing: what
    counts is where they come to rest.
    """
    panel.page.wait_for_function(
        "() => { const panel = [...document.querySelectorAll('.gpumem-panel')].at(-1);"
        " const charts = panel.querySelector('.main-svg');"
        " return charts && Math.abs(charts.clientWidth - panel.clientWidth) < 24; }"
    )
    deadline = time.monotonic() + TIMEOUT_S
    before: list[Box] = []
    while (now := texts(panel)) != before or ((_collisions(now) or _sticks_out(panel)) and time.monotonic() < deadline):
        before = now
        panel.page.wait_for_timeout(_REDRAWN_MS)
    assert _collisions(now) == []
    assert _sticks_out(panel) == []


def _collisions(boxes: list[Box]) -> list[tuple[Box, Box]]:
    """What covers each other; a button in the place of messages belongs there."""
    return [
        (one, other)
        for one, other in combinations(boxes, 2)
        if one.covers(other) and not (one.text.startswith(other.text) or other.text.startswith(one.text))
    ]


def size(panel: PanelPage) -> tuple[float, float]:
    """Width of the panel, and pixels from its top to the end of its buttons of answers."""
    width, height = panel.page.locator(".gpumem-panel").last.evaluate(
        "panel => [panel.clientWidth, panel.querySelector('.gpumem-answers').getBoundingClientRect().bottom"
        " - panel.getBoundingClientRect().top]"
    )
    return width, height


_PARTS = {
    "status": ".gpumem-top",
    "numbers": ".gpumem-tiles",
    "memory": ".gpumem-charts",
    "knobs": ".gpumem-knobs",
    "charts": ".gpumem-charts",
}
_SEEN = """(panel, parts) => {
    const frame = (panel.closest('.jupyterlab-sidecar') ?? panel.closest('.jp-WindowedPanel-outer, .jp-Notebook') ??
        document.body).getBoundingClientRect();
    const bottom = Math.min(frame.bottom, innerHeight);
    return Object.entries(parts).map(([name, selector]) => {
        const part = panel.querySelector(selector), box = part.getBoundingClientRect();
        const memory = parseFloat(getComputedStyle(part).getPropertyValue('--gpumem-memory'));
        const end = name === 'memory' ? box.top + memory : box.bottom;
        return [name, box.top >= frame.top - 1, (Math.min(end, bottom) - box.top) / (end - box.top)];
    });
}"""


def seen(panel: PanelPage) -> dict[str, float]:
    """Which share of each part of the panel that was opened last is seen without scrolling; 0 where its top is not."""
    found = panel.page.locator(".gpumem-panel").last.evaluate(_SEEN, _PARTS)
    return {name: share if is_begun else 0.0 for name, is_begun, share in found}


def _sticks_out(panel: PanelPage) -> list[str]:
    """What reaches beyond the panel's sides, or is cut off within its own box."""
    boxes = texts(panel)
    left, right = panel.page.locator(".gpumem-panel").last.evaluate(
        "panel => [panel.getBoundingClientRect().left, panel.getBoundingClientRect().right]"
    )
    cut: list[str] = panel.page.locator(".gpumem-panel").last.evaluate(
        "panel => [...panel.querySelectorAll('.gpumem-tiles b, button')]"
        ".filter(one => one.offsetWidth && one.scrollWidth > one.clientWidth + 1).map(one => one.textContent)"
    )
    return [box.text for box in boxes if box.left < left - 1 or box.right > right + 1] + cut
