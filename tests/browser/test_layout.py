"""What is seen of a panel without scrolling, on the screens that people have, in every state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.tiers import every, first_tier

from .lab import Lab
from .layout import expect_tidy, seen
from .panel_page import SET_DEFAULTS, PanelPage, open_panel

pytestmark = pytest.mark.browser

SCREENS = [(1366, 768, True), (700, 700, False), (1024, 768, True), (1920, 1080, True), (2560, 1440, False)]
NOTEBOOK_PX = 480  # as wide as the notebook's column stays beside a docked panel


@pytest.fixture(scope="module")
def panel(lab: Lab, chrome: Browser) -> Iterator[PanelPage]:
    start = "s = gm.start(2, device='cpu', memory_limit='96MiB')"
    panel = open_panel(lab, chrome, "layout.ipynb", start, "s.panel().dock();", "s.panel(big=True)")
    panel.notebook.evaluate("s.train(6) and None")
    yield panel
    panel.notebook.evaluate("s.stop()")
    panel.notebook.close()


def rests(panel: PanelPage) -> None:
    """Nothing is open but what always is."""


def explains(panel: PanelPage) -> None:
    """A knob has the focus."""
    panel.foreseen("checkpointing", "blocks")


def ran_out_of_memory(panel: PanelPage) -> None:
    """The card lies over the charts of memory."""
    panel.notebook.evaluate(f"{SET_DEFAULTS} or s.set(batch_size=300) and s.play()")
    expect(panel.alert).to_contain_text("would have fit")
    panel.notebook.evaluate("s.pause()")


def unfolded(panel: PanelPage) -> None:
    """All further knobs are shown."""
    panel.unfold()


def examined(panel: PanelPage) -> None:
    """The doctor's answer is open."""
    panel.ask("Doctor")
    expect(panel.said).to_contain_text("Doctor")


def leave(panel: PanelPage) -> None:
    """Close what a state has opened."""
    for _ in range(3):
        panel.page.keyboard.press("Escape")
    panel.notebook.evaluate(SET_DEFAULTS)
    panel.fold()
    if panel.page.locator(".gpumem-answer-top:visible").count():
        panel.page.locator(".gpumem-close-answer:visible").first.click()


@pytest.mark.parametrize("state", first_tier([rests, explains, ran_out_of_memory, unfolded, examined], every(5)))
@pytest.mark.parametrize(("width", "height", "docked"), first_tier(SCREENS, every(5)))
def test_what_matters_is_seen_without_scrolling_and_nothing_covers_anything(
    panel: PanelPage, width: int, height: int, docked: bool, state: Callable[[PanelPage], None]
) -> None:
    page = panel.page
    page.set_viewport_size({"width": width, "height": height})
    is_open = page.evaluate("!document.querySelector('#jp-left-stack').classList.contains('lm-mod-hidden')")
    if is_open != (width >= 1366):  # beside an open file browser, where there is room for one
        page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
    panel.notebook.run(3 if docked else 2)
    try:
        panel.wait_until_shown()
        state(panel)
        shown = page.locator(".gpumem-panel").last
        shown.evaluate("panel => panel.scrollIntoView({block: 'start'})")
        expect_tidy(panel)
        parts = seen(panel)
        assert parts.pop("charts") > 0.75, "loss and throughput are seen at least partly"
        assert parts == {"status": 1, "numbers": 1, "memory": 1, "knobs": 1}
        if docked and width >= 1366:
            assert page.locator(".jp-NotebookPanel").first.bounding_box()["width"] >= NOTEBOOK_PX  # type: ignore[index]
    finally:
        leave(panel)
        panel.notebook.evaluate("s.panel().close()")


@pytest.mark.full
def test_large_type_can_be_read_from_the_back_of_a_room(panel: PanelPage) -> None:
    page = panel.page
    page.set_viewport_size({"width": 1920, "height": 1080})
    panel.notebook.run(4)
    try:
        panel.wait_until_shown()
        page.locator(".gpumem-panel").last.evaluate("panel => panel.scrollIntoView({block: 'start'})")
        expect_tidy(panel)
        assert seen(panel) == {"status": 1, "numbers": 1, "memory": 1, "knobs": 1, "charts": 1}
        sizes = page.locator(".gpumem-panel.gpumem-big").evaluate("panel => getComputedStyle(panel).fontSize")
        assert sizes == "21px"
        buttons = page.locator(".gpumem-panel.gpumem-big button:visible").all()
        small = [
            one.inner_text()
            for one in buttons
            if one.evaluate("one => parseFloat(getComputedStyle(one).fontSize)") < 18
        ]
        assert not small
    finally:
        panel.notebook.evaluate("s.panel().close()")
