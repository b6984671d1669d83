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


def test_the_knob_that_has_the_focus_is_explained_and_a_press_flips_it(panel: PanelPage) -> None:
    panel.notebook.evaluate(SET_DEFAULTS)
    for knob, value in (("checkpointing", "blocks"), ("precision", "bf16")):
        row = panel.foreseen(knob, value)
        expect(panel.tip).to_contain_text(knob)
        before, said = (
            panel.notebook.evaluate(f"s.foreseen(s.settings{to}).live_peak_bytes")
            for to in ("", f".replace({knob}={value!r})")
        )
        assert isinstance(before, int)
        assert isinstance(said, int)
        expect(row).to_contain_text(f"−{format_bytes(before - said)}")
        expect(row).to_contain_text("same results" if knob == "checkpointing" else "results differ")
        expect_tidy(panel)
        row.get_by_role("button", name="flip").click()
        panel.notebook.until(f"s.settings.{knob} == {value!r}")
        panel.notebook.evaluate("s.train(1) and None")
        expect(panel.effect).to_contain_text(f"predicted {format_bytes(said)}, measured {format_bytes(said)}")
    panel.control("batch_size").focus()
    expect(panel.tip).to_contain_text(re.compile(r"Critical batch (not known|about [0-9,]+ samples)"))
    expect(panel.tip).to_contain_text("is the largest that fits")
    panel.page.keyboard.press("Escape")
    expect(panel.tip).to_have_text("")
    panel.notebook.evaluate(SET_DEFAULTS)


def test_a_flip_that_is_known_not_to_fit_is_said_once_and_then_made(panel: PanelPage) -> None:
    panel.notebook.evaluate(f"{SET_DEFAULTS} or s.predict(batch_size=300) and None")
    panel.choose("batch_size", "300")
    expect(panel.error("batch_size")).to_contain_text("will not fit: ")
    expect(panel.control("batch_size")).to_have_value("32")
    panel.choose("batch_size", "300")  # asked for again
    panel.notebook.until("s.settings.batch_size == 300")
    expect(panel.error("batch_size")).to_have_text("")
    panel.notebook.evaluate(SET_DEFAULTS)
