"""How long people wait for the panel: until its charts are seen, and from a flip in it to what the flip did.

``python -m tests.bench.panel`` takes two minutes. Kernel, ranks, JupyterLab and browser are real, the screen is a
laptop's, each round has a page of its own, and the page itself takes the times.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any

from playwright.sync_api import Browser

from tests.bench.figures import Figure, say
from tests.browser.lab import Lab, browser, started
from tests.browser.panel_page import PanelPage

START = "%load_ext gpumem_nb\nsession = %hvd_start 2 --memory-limit 96MiB\n%hvd_load digits-resnet"
FLIPS = ("bf16", "fp32", "bf16", "fp32", "bf16")
# Milliseconds from a press of a key or a choice to when each of these is first seen, looked at before every frame.
WATCH = """wanted => {
    const seen = window.gpumemSeen = {};
    const begin = () => {
        const began = performance.now();
        const look = () => {
            for (const [name, [selector, words]] of Object.entries(wanted))
                if (!(name in seen) && [...document.querySelectorAll(selector)].some(
                    one => one.getBoundingClientRect().height > 0 && one.textContent.includes(words)))
                    seen[name] = performance.now() - began;
            if (Object.keys(seen).length < Object.keys(wanted).length) requestAnimationFrame(look);
        };
        requestAnimationFrame(look);
    };
    for (const kind of ['keydown', 'change'])
        document.addEventListener(kind, begin, { capture: true, once: true });
}"""
SHOWN = {
    "controls": [".gpumem-panel select", ""],
    "charts": [".gpumem-panel .main-svg .annotation-text", "Now, by rank"],
}


def figures(rounds: int) -> list[Figure]:
    """Until the controls and the charts of a panel are seen, for the first time in a page and again; flips."""
    chromium = shutil.which("chromium") or sys.exit("No chromium was found.")
    first, again, controls, flips = list[float](), list[float](), list[float](), list[float]()
    with started() as lab, browser(chromium) as chrome:
        for number in range(rounds):
            of_round, of_flips = _round(lab, chrome, number)
            say(f"{of_round}, flips {of_flips}")
            first.append(of_round["first"]["charts"])
            controls.append(of_round["first"]["controls"])
            again.append(of_round["again"]["charts"])
            flips += of_flips
    return [
        Figure("panel: from running its cell to its charts, first in a page", "≤ 1 s", " s", first, "1366 × 768"),
        Figure("the same: to its controls", "", " s", controls),
        Figure(
            "panel: from running its cell to its charts, once more", "≤ 1 s", " s", again, "the same kernel and page"
        ),
        Figure("panel: from a choice to what the flip did, 2 ranks", "≤ 1 s", " s", flips, "precision, while training"),
    ]


def _round(lab: Lab, chrome: Browser, number: int) -> tuple[dict[str, dict[str, float]], list[float]]:
    name = f"panel{number}.ipynb"
    lab.write(name, [START, "%hvd_panel", "session.panel().close()"])
    notebook = lab.open(chrome, name, 1366, 768)
    said = notebook.run(0).inner_text()
    assert "Traceback" not in said, said
    notebook.until("'gpumem_nb.ui.panel' in __import__('sys').modules")
    found = {}
    for which in ("first", "again"):
        notebook.page.evaluate(WATCH, SHOWN)
        notebook.run(1)
        found[which] = _seen(notebook.page, len(SHOWN))
        if which == "first":
            notebook.run(2)
    panel, flips = PanelPage(notebook), []
    panel.wait_until_shown()
    panel.play()
    panel.wait_for_steps(20)
    for value in FLIPS:
        notebook.page.evaluate(WATCH, {"flip": [".gpumem-effect", f"→ {value}"]})
        panel.choose("precision", value)
        flips.append(_seen(notebook.page, 1)["flip"])
        panel.wait_for_steps(5)
    notebook.evaluate("session.stop()")
    notebook.close()
    return found, flips


def _seen(page: Any, count: int) -> dict[str, float]:
    """Wait for what was to be seen; in seconds."""
    page.wait_for_function("count => Object.keys(window.gpumemSeen).length === count", arg=count)
    return {name: milliseconds / 1000 for name, milliseconds in page.evaluate("window.gpumemSeen").items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    for figure in figures(parser.parse_args().rounds):
        print(f"{figure.name}: {figure.measured} ({figure.target}; {figure.details})")
