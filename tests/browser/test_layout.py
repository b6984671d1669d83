"""What is seen of a panel without scrolling, on the screens that people have, in every state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.tiers import every, first_tier

from .lab import Lab
from .layout import expect_tidy, seen
from .panel_page import SET_DEFAULTS, PanelPage, named, open_panel

pytestmark = pytest.mark.browser

SCREENS = [(1366, 768), (700, 700), (1024, 768), (1920, 1080), (2560, 1440)]
NOTEBOOK_PX = 480  # as wide as the notebook's column stays beside a docked panel


@pytest.fixture(scope="module")
def panel(lab: Lab, chrome: Browser) -> Iterator[PanelPage]:
    start = "s = gm.start(2, device='cpu', memory_limit='96MiB')"
    panel = open_panel(lab, chrome, "layout.ipynb", start, "s.panel().dock();", "s.panel(big=True)")
    panel.notebook.evaluate("s.train(6) and None")
    panel.notebook.evaluate("s.panel().close()")  # each test opens its own, and wants no other on the page
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


def tuned(panel: PanelPage) -> None:
    """The tuner's answer is open, with all that was measured."""
    panel.ask("Tune")
    panel.page.locator(".gpumem-answer").get_by_role("button", name=named("details")).click()
    panel.page.locator(".gpumem-answer .js-plotly-plot:visible").wait_for()


def stopped(panel: PanelPage) -> None:
    """The ranks have ended."""
    panel.notebook.evaluate("s.stop()")
    expect(panel.status).to_contain_text("Press Restart")


def leave(panel: PanelPage) -> None:
    """Close what a state has opened."""
    panel.notebook.evaluate("s.ended and s.restart() and None")
    for _ in range(3):
        panel.page.keyboard.press("Escape")
    panel.notebook.evaluate(SET_DEFAULTS)
    panel.fold()
    if panel.page.locator(".gpumem-answer-top:visible").count():
        panel.page.locator(".gpumem-close-answer:visible").first.click()


STATES = [rests, explains, ran_out_of_memory, unfolded, examined, tuned, stopped]


@pytest.mark.parametrize("state", first_tier(STATES, every(len(STATES))))
@pytest.mark.parametrize("docked", first_tier([True, False], every(2)))
def test_what_matters_is_seen_without_scrolling_and_nothing_covers_anything(
    panel: PanelPage, docked: bool, state: Callable[[PanelPage], None]
) -> None:
    panel.page.set_viewport_size({"width": SCREENS[0][0], "height": SCREENS[0][1]})
    panel.notebook.run(3 if docked else 2)
    try:
        panel.wait_until_shown()
        state(panel)
        for width, height in SCREENS:
            if width > 700 or not docked:  # beside a notebook there is no room for one
                _look(panel, width, height, docked)
    finally:
        leave(panel)
        panel.notebook.evaluate("s.panel().close()")


def _look(panel: PanelPage, width: int, height: int, docked: bool) -> None:
    page = panel.page
    page.set_viewport_size({"width": width, "height": height})
    is_open = page.evaluate("!document.querySelector('#jp-left-stack').classList.contains('lm-mod-hidden')")
    if is_open != (width >= 1366):  # beside an open file browser, where there is room for one
        page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
    page.locator(".gpumem-panel").last.evaluate("panel => panel.scrollIntoView({block: 'start'})")
    expect_tidy(panel)
    parts, screen = seen(panel), f"{width} × {height}"
    assert parts.pop("charts") > 0.75, f"{screen}: loss and throughput are seen at least partly"
    assert parts == {"status": 1, "numbers": 1, "memory": 1, "knobs": 1}, screen
    if docked and width >= 1366:
        assert page.locator(".jp-NotebookPanel").first.bounding_box()["width"] >= NOTEBOOK_PX  # type: ignore[index]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_many_ranks_cover_nothing(lab: Lab, chrome: Browser, ranks: int) -> None:
    cells = ["from tests.bench.many_ranks import Fed", f"fed = Fed({ranks}, steps=8)\nfed.shown()"]
    lab.write(f"ranks{ranks}.ipynb", cells)
    panel = PanelPage(lab.open(chrome, f"ranks{ranks}.ipynb", *SCREENS[0]))
    try:
        for cell in range(len(cells)):
            panel.notebook.run(cell)
        panel.wait_until_shown()
        panel.notebook.until("fed.history.steps == fed.last")
        for width, height in SCREENS:
            _look(panel, width, height, docked=False)
    finally:
        panel.notebook.close()


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
