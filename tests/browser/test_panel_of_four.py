"""Four ranks: a setting that does not fit, and the panel beside the notebook."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from .lab import Lab
from .panel_page import open_panel

pytestmark = pytest.mark.browser


def test_out_of_memory_is_explained_survived_and_taken_back(lab: Lab, chrome: Browser) -> None:
    start = "s = gm.start(4, device='cpu', memory_limit='96MiB')"
    panel = open_panel(lab, chrome, "four.ipynb", start, "s.panel().dock();")
    panel.press("Play")
    panel.wait_for_steps(2)
    panel.choose("batch_size", "300")
    expect(panel.alert).to_contain_text("ran out of memory")
    expect(panel.alert).to_contain_text("went back to batch_size=32")
    expect(panel.control("batch_size")).to_have_value("32")
    panel.wait_for_steps(2)
    expect(panel.page.locator(".gpumem-panel .annotation-text", has_text="OOM batch 300").first).to_be_visible()
    panel.pause()
    assert [trace["name"] for trace in panel.traces("x2")] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert panel.traces("x")[-1]["y"] == [96] * 4
    panel.notebook.run(3)
    expect(panel.page.locator(".jp-LinkedOutputView .gpumem-status, .jp-MainAreaWidget .gpumem-status")).to_have_count(
        2
    )
    panel.notebook.evaluate("s.panel().close()")
    expect(panel.page.locator(".gpumem-panel")).to_have_count(0)
    panel.notebook.evaluate("s.stop()")
    panel.notebook.close()
