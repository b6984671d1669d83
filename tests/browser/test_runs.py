"""Runs in a real browser: a table that sorts in JupyterLab, two runs drawn, and a report that needs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, expect

from tests.tiers import every, first_tier

from .lab import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.full]

TRAIN = """
%load_ext gpumem_nb
import gpumem_nb as gm
s = gm.start(2, device="cpu", memory_limit="96MiB")
s.load("digits-resnet", width=8, depth=1, resolution=8)
for size in (16, 64, 8):
    s.set(batch_size=size)
    s.train(12)
s.runs.note(2, "<b>large</b>")
"""


@pytest.fixture(scope="module")
def notebook(lab: Lab, chrome: Browser) -> Iterator[Notebook]:
    """A notebook in which three configurations were tried."""
    lab.write("runs.ipynb", [TRAIN, "%hvd_runs", "s.runs.compare(1, 2)", "%hvd_report report.html"])
    notebook = lab.open(chrome, "runs.ipynb")
    notebook.run(0)
    yield notebook
    notebook.evaluate("s.stop()")
    notebook.close()


def numbers(table: Locator) -> list[str]:
    """The numbers of the runs, from the top."""
    return table.locator("tbody tr td:first-child").all_inner_texts()


def test_a_click_on_a_heading_sorts(notebook: Notebook) -> None:
    table = notebook.run(1).locator("table")
    expect(table.get_by_role("button", name="samples/s", exact=True)).to_be_visible()
    assert numbers(table) == ["1", "2", "3"]
    assert "<b>large</b>" in table.inner_text()
    batch = table.get_by_role("button", name="batch", exact=True)
    batch.click()
    assert numbers(table) == ["3", "1", "2"]
    expect(table.locator("th[aria-sort=ascending]")).to_contain_text("batch")
    batch.press("Enter")  # without a mouse
    assert numbers(table) == ["2", "1", "3"]


@pytest.mark.full
def test_two_runs_are_drawn_below_their_table(notebook: Notebook) -> None:
    cell = notebook.run(2)
    expect(cell.locator("table").first).to_contain_text("Run 1 → 2: batch_size 16 → 64")
    expect(cell.locator(".js-plotly-plot")).to_have_count(1)
    expect(cell.locator(".js-plotly-plot .legendtext")).to_have_text(["run 1", "run 2"])
    assert cell.locator(".js-plotly-plot .scatterlayer .trace").count() == 6


@pytest.mark.parametrize("scheme", first_tier(["light", "dark"], every(2)))
def test_a_report_opens_without_network_and_kernel(notebook: Notebook, lab: Lab, chrome: Browser, scheme: Any) -> None:
    notebook.run(3)
    context = chrome.new_context(viewport={"width": 1300, "height": 900}, offline=True, color_scheme=scheme)
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto((lab.root / "report.html").as_uri())
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_visible()
    assert page.locator(".js-plotly-plot .scatterlayer .trace").count() > 3
    table = page.locator(".gpumem-runs table")
    table.get_by_role("button", name="batch", exact=True).click()
    assert numbers(table) == ["3", "1", "2"]
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide == 0, "the page as a whole fits its window"
    assert (asked, wrong) == ([(lab.root / "report.html").as_uri()], [])
    context.close()
