"""A panel outlives its session, serves the next one in the same place, and says when its kernel is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from .lab import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.full]

START = "import gpumem_nb as gm\ns = gm.start(2, device='cpu', memory_limit='96MiB')\ns.load('digits-resnet');"
DOCK = "s.panel().dock();"
PANEL_THREADS = "[t.name for t in __import__('threading').enumerate() if t.name.startswith('gpumem_nb panel')]"
DOCKED = ".jupyterlab-sidecar .gpumem-panel"


@pytest.fixture(scope="module")
def notebook(lab: Lab, chrome: Browser) -> Iterator[Notebook]:
    lab.write("life.ipynb", [START, DOCK])
    opened = lab.open(chrome, "life.ipynb")
    opened.run(0)
    opened.run(1)
    yield opened
    opened.close()


def areas(notebook: Notebook) -> int:
    """How many tab bars lie side by side in the main area."""
    return notebook.page.locator("#jp-main-dock-panel > .lm-TabBar").count()


def test_the_next_session_is_shown_by_the_panel_that_is_open(notebook: Notebook) -> None:
    status = notebook.page.locator(f"{DOCKED} .gpumem-status")
    expect(status).to_contain_text("press Play")
    assert areas(notebook) == 2
    notebook.evaluate("s.stop()")
    expect(status).to_contain_text("Stopped")
    notebook.until(f"not {PANEL_THREADS}")
    notebook.run(0)
    expect(status).to_contain_text("press Play")
    notebook.page.locator(f"{DOCKED} button", has_text="Play").click()
    notebook.until("s.history.steps")
    notebook.evaluate("s.pause()")
    notebook.run(1)  # docked again, it is there once
    expect(notebook.page.locator(DOCKED)).to_have_count(1)
    assert areas(notebook) == 2


def test_a_panel_whose_kernel_is_gone_says_so_and_makes_room_for_the_next(notebook: Notebook) -> None:
    notebook.page.evaluate("jupyterapp.shell.currentWidget.sessionContext?.restartKernel()")
    dead = notebook.page.locator(f"{DOCKED}.jupyter-widgets-disconnected")
    expect(dead).to_have_count(1)
    banner = dead.evaluate("panel => getComputedStyle(panel, '::before').content")
    assert "The kernel that drew this panel has ended" in banner
    assert "%load_ext gpumem_nb" in banner, "without it there are no magics"
    assert not dead.locator(".gpumem-status").is_visible()
    notebook.run(0)
    notebook.run(1)
    expect(notebook.page.locator(f"{DOCKED} .gpumem-status")).to_contain_text("press Play")
    expect(dead).to_have_count(0)
    assert areas(notebook) == 2


def test_a_panel_whose_kernel_is_shut_down_says_so_and_offers_no_restart(notebook: Notebook) -> None:
    notebook.page.evaluate("jupyterapp.shell.currentWidget.sessionContext?.shutdown()")
    dead = notebook.page.locator(f"{DOCKED}.jupyter-widgets-disconnected")
    expect(dead).to_have_count(1)
    assert not dead.get_by_role("button").first.is_visible()
