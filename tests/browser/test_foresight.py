"""What is foreseen at the knobs of a panel in a real browser, and what came."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from gpumem_nb.shared.units import format_bytes

from .lab import Lab
from .layout import expect_tidy
from .panel_page import SET_DEFAULTS, PanelPage, open_panel

pytestmark = [pytest.mark.browser, pytest.mark.full]


@pytest.fixture(scope="module")
def panel(lab: Lab, chrome: Browser) -> Iterator[PanelPage]:
    panel = open_panel(lab, chrome, "foresight.ipynb", "s = gm.start(2, device='cpu', memory_limit='96MiB')")
    yield panel
    panel.notebook.evaluate("s.stop()")
    panel.notebook.close()


def test_what_was_predicted_stands_beside_what_came(panel: PanelPage) -> None:
    panel.notebook.evaluate("s.train(1) and None")
    peak = panel.notebook.evaluate("s.predict(batch_size=16).live_peak_bytes")
    panel.notebook.evaluate("s.set(batch_size=16) and s.train(1) and None")
    expect(panel.effect).to_contain_text(f"predicted {format_bytes(peak)}, measured ")


def test_every_flip_is_foreseen_at_its_knob(panel: PanelPage) -> None:
    panel.notebook.evaluate(SET_DEFAULTS)
    panel.press("what if")
    try:
        flips = panel.page.locator(".gpumem-panel .gpumem-flip")
        expect(flips.filter(has_text="at most")).to_be_visible()
        expect(panel.page.locator(".gpumem-batch-lines polyline")).to_have_count(5)  # the last thing that is found out
        expect(flips.filter(has_text="…")).to_have_count(0)
        expect_tidy(panel)
        for knob, value in (("checkpointing", "blocks"), ("precision", "bf16")):
            said = panel.foreseen(knob, value)
            panel.notebook.evaluate(f"s.set({knob}={value!r}) and s.train(1) and None")
            expect(panel.effect).to_contain_text(f"predicted {said}, measured {said}")
        panel.notebook.evaluate(SET_DEFAULTS)
        panel.choose("batch_size", "300")
        expect(panel.error("batch_size")).to_contain_text("will not fit: ")
        expect(panel.control("batch_size")).to_have_value("32")
        panel.choose("batch_size", "300")  # asked for again
        panel.notebook.until("s.settings.batch_size == 300")
        expect(panel.error("batch_size")).to_have_text("")
    finally:
        panel.press("what if")
        panel.notebook.evaluate(SET_DEFAULTS)
    expect(flips).to_have_count(0)


def test_the_critical_batch_stands_in_the_field_of_the_batch_beside_its_number(panel: PanelPage) -> None:
    panel.notebook.evaluate("s.train(12) and None")
    words = ".gpumem-panel .gpumem-critical span[title]"
    expect(panel.page.locator(words)).to_have_text(re.compile(r"critical batch (n/a|[0-9,]+)"))
    field = panel.control("batch_size").bounding_box()
    assert field
    # At once: with each step the panel may put new words in the place of the old.
    box = panel.page.evaluate("words => document.querySelector(words).getBoundingClientRect().toJSON()", words)
    assert field["x"] + 3 * box["height"] < box["x"] < box["x"] + box["width"] < field["x"] + field["width"]
    assert field["y"] < box["y"] < box["y"] + box["height"] < field["y"] + field["height"]
