"""Make docs/panel.png: the real panel of four training ranks, after a few flips and one that did not fit.

Run with ``python docs/screenshot.py [light|dark]``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import expect

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser.lab import Lab, browser, chromium
from tests.browser.panel_page import PanelPage, open_panel

FLIPS = (("precision", "bf16"), ("checkpointing", "blocks"), ("batch_size", "64"), ("precision", "fp32"))
TOO_LARGE = ("batch_size", "375")
LAST = ("checkpointing", "sqrt")
STEPS = 15


def main(theme: str, path: Path) -> None:
    """Take the picture."""
    lab = Lab()
    try:
        lab.wait_until_up()
        executable = chromium()
        if executable is None:
            sys.exit("No chromium was found: install it, or name one with CHROMIUM=/path/to/it.")
        with browser(executable) as chrome:
            start = "session = s = gm.start(4, device='cpu', memory_limit='96MiB')"
            panel = open_panel(lab, chrome, "panel.ipynb", start)
            panel.notebook.theme(f"JupyterLab {theme.title()}")
            panel.page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
            _tell_a_story(panel)
            panel.page.mouse.move(0, 0)
            panel.page.locator(".gpumem-panel").screenshot(path=path)
            panel.notebook.evaluate("s.stop()")
            panel.notebook.close()
    finally:
        lab.stop()


def _tell_a_story(panel: PanelPage) -> None:
    panel.press("Play")
    panel.wait_for_steps(STEPS)
    for knob, value in FLIPS:
        panel.choose(knob, value)
        panel.wait_for_steps(STEPS)
    panel.choose(*TOO_LARGE)
    expect(panel.alert).to_contain_text("went back", timeout=60_000)
    panel.wait_for_steps(STEPS)
    panel.choose(*LAST)
    panel.wait_for_steps(STEPS)


if __name__ == "__main__":
    main((sys.argv[1:] or ["light"])[0], Path(__file__).with_name("panel.png"))
