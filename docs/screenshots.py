"""Make the pictures in docs/panel: the real panel of training ranks, in themes, widths and states.

Run with ``python docs/screenshots.py``, or name some of them: ``python docs/screenshots.py light docked``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, expect

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser.lab import TIMEOUT_S, Lab, browser, chromium
from tests.browser.panel_page import PanelPage, named, open_panel

FOLDER = Path(__file__).with_name("panel")
FLIPS = (("precision", "bf16"), ("checkpointing", "blocks"), ("batch_size", "64"), ("precision", "fp32"))
TOO_LARGE = ("batch_size", "375")
LAST = ("checkpointing", "sqrt")
STEPS = 15
PRINTED = 2.0  # pixels of a picture in place of one, so that it is sharp on paper


class Studio:
    """A JupyterLab and a browser in which pictures are taken."""

    def __init__(self, lab: Lab, chrome: Browser) -> None:
        self._lab = lab
        self._chrome = chrome

    @contextmanager
    def panel(self, ranks: int = 4, width: int = 1100, *more_cells: str) -> Iterator[PanelPage]:
        """A panel of so many ranks on a page so many pixels wide, without JupyterLab's side bar."""
        start = f"session = s = gm.start({ranks}, device='cpu', memory_limit='96MiB')"
        panel = open_panel(self._lab, self._chrome, f"panel{ranks}-{width}.ipynb", start, *more_cells)
        panel.page.set_viewport_size({"width": width, "height": 1500})
        if panel.page.evaluate("!document.querySelector('#jp-left-stack').classList.contains('lm-mod-hidden')"):
            panel.page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
        yield panel
        panel.notebook.evaluate("s.stop()")
        panel.notebook.close()

    def picture(self, panel: PanelPage, name: str, whole_page: bool = False) -> None:
        """Write a picture of the panel, or of all of JupyterLab, without the pointer in it."""
        panel.page.mouse.move(0, 0)
        path = FOLDER / f"{name}.png"
        if whole_page:
            panel.page.screenshot(path=path)
        else:
            panel.page.locator(".gpumem-panel").first.screenshot(path=path)
        print(path, flush=True)


def main(names: list[str]) -> None:
    """Take the pictures with these names, or all."""
    executable = chromium()
    if executable is None:
        sys.exit("No chromium was found: install it, or name one with CHROMIUM=/path/to/it.")
    expect.set_options(timeout=TIMEOUT_S * 1000)
    FOLDER.mkdir(exist_ok=True)
    lab = Lab(PRINTED)
    try:
        lab.wait_until_up()
        with browser(executable) as chrome:
            for name in names or PICTURES:
                PICTURES[name](Studio(lab, chrome))
    finally:
        lab.stop()


def light(studio: Studio) -> None:
    """The story of the README, and the same in large type."""
    with studio.panel() as panel:
        _train(panel)
        _tell_a_story(panel)
        studio.picture(panel, "light")


def dark(studio: Studio) -> None:
    """The dark theme."""
    with studio.panel() as panel:
        panel.notebook.theme("JupyterLab Dark")
        _train(panel)
        panel.choose("checkpointing", "blocks")
        panel.wait_for_steps(STEPS)
        studio.picture(panel, "dark")
        panel.notebook.theme("JupyterLab Light")  # for the pictures after this one


def of_width(width: int) -> Callable[[Studio], None]:
    """A narrow page, such as a panel docked on a small screen has, or a wide one."""

    def take(studio: Studio) -> None:
        with studio.panel(2, width) as panel:
            _train(panel)
            panel.choose("precision", "bf16")
            panel.wait_for_steps(STEPS)
            studio.picture(panel, f"{width}px")

    return take


def docked(studio: Studio) -> None:
    """Beside the notebook, on a laptop."""
    with studio.panel(2, 1366, "s.panel().dock();") as panel:
        panel.page.set_viewport_size({"width": 1366, "height": 900})
        _train(panel)
        panel.notebook.run(3)
        panel.wait_for_steps(STEPS)
        studio.picture(panel, "docked", whole_page=True)


def eight(studio: Studio) -> None:
    """Eight ranks."""
    with studio.panel(8, 1100) as panel:
        _train(panel)
        studio.picture(panel, "8-ranks")


def out_of_memory(studio: Studio) -> None:
    """After a setting that did not fit."""
    with studio.panel(2) as panel:
        _train(panel)
        panel.choose(*TOO_LARGE)
        expect(panel.alert).to_contain_text("would have fit")
        panel.wait_for_steps(2)
        studio.picture(panel, "out-of-memory")


def planning(studio: Studio) -> None:
    """What the flips of a knob would bring."""
    with studio.panel(2, 700) as panel:
        _train(panel)
        panel.pause()
        for value in ("blocks", "sqrt"):
            panel.foreseen("checkpointing", value)
        studio.picture(panel, "planning")


def answers(studio: Studio) -> None:
    """What is wanted does not fit: doctor, tuner, and the page to hand on."""
    with studio.panel(2) as panel:
        page = panel.page
        panel.choose("batch_size", "256")
        panel.press("Play")
        expect(panel.alert).to_contain_text("would have fit: ")
        panel.ask("Doctor")
        page.locator(".gpumem-finding").first.wait_for()
        studio.picture(panel, "doctor")
        panel.ask("Tune")
        page.locator(".gpumem-apply").wait_for()
        page.locator(".gpumem-answer").get_by_role("button", name=named("details")).click()
        page.locator(".gpumem-answer .js-plotly-plot").wait_for()
        studio.picture(panel, "tuner")
        page.locator(".gpumem-apply").click()
        panel.ask("Tune")
        _train(panel)
        panel.choose("checkpointing", "sqrt")
        panel.wait_for_steps(STEPS)
        panel.pause()
        report = str(FOLDER / "report.html")
        panel.notebook.evaluate(f"str(s.report({report!r}))")
        with page.context.expect_page() as opened:
            page.evaluate("window.open('about:blank')")
        shown = opened.value  # with as many pixels as its opener
        shown.set_viewport_size({"width": 1100, "height": 1500})
        shown.set_content(Path(report).read_text())
        shown.locator(".js-plotly-plot").first.wait_for()
        shown.screenshot(path=FOLDER / "report.png")
        shown.close()
        Path(report).unlink()


def big(studio: Studio) -> None:
    """In type for a room."""
    with studio.panel(2, 1300) as panel:
        panel.notebook.evaluate("s.panel().close()")
        panel.notebook.page.locator(".jp-CodeCell").nth(2).locator(".cm-content").fill("s.panel(big=True)")
        panel.notebook.run(2)
        panel.wait_until_shown()
        _train(panel)
        studio.picture(panel, "big")


PICTURES: dict[str, Callable[[Studio], None]] = {
    "light": light,
    "dark": dark,
    "narrow": of_width(700),
    "wide": of_width(2200),
    "docked": docked,
    "eight": eight,
    "out-of-memory": out_of_memory,
    "planning": planning,
    "answers": answers,
    "big": big,
}


def _train(panel: PanelPage) -> None:
    panel.press("Play")
    panel.wait_for_steps(STEPS)


def _tell_a_story(panel: PanelPage) -> None:
    for knob, value in FLIPS:
        panel.choose(knob, value)
        panel.wait_for_steps(STEPS)
    panel.choose(*TOO_LARGE)
    expect(panel.alert).to_contain_text("went back")
    panel.wait_for_steps(STEPS)
    panel.choose(*LAST)
    panel.wait_for_steps(STEPS)


if __name__ == "__main__":
    main(sys.argv[1:])
