"""Three presses lead from a batch that does not fit to a script that trains: doctor, tuner, export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from .lab import Lab
from .panel_page import PanelPage, named, open_panel

LIMIT_MIB = 48


def _started(lab: Lab, chrome: Any) -> PanelPage:
    return open_panel(lab, chrome, "answers.ipynb", f"s = gm.start(2, device='cpu', memory_limit='{LIMIT_MIB}MiB')")


@pytest.mark.full
def test_three_presses_lead_to_a_script(lab: Lab, chrome: Any) -> None:
    panel = _started(lab, chrome)
    page = panel.page
    try:
        panel.choose("batch_size", "128")
        panel.press("Play")
        expect(panel.alert).to_contain_text("would have fit")

        panel.ask("Doctor")
        finding = page.locator(".gpumem-finding").first
        expect(finding).to_contain_text("A step ran out of memory")
        expect(finding.get_by_role("button")).to_contain_text("Apply ")

        panel.ask("Tune")  # the first of three presses
        expect(finding).to_be_hidden()
        expect(panel.said.first).to_contain_text("Doctor, ")  # a line of it stays
        apply = page.locator(".gpumem-apply")
        apply.wait_for()
        expect(page.locator(".gpumem-answer .js-plotly-plot")).to_have_count(0)
        page.locator(".gpumem-answer").get_by_role("button", name=named("details")).click()
        page.locator(".gpumem-answer .js-plotly-plot").wait_for()
        expect(panel.said.last).to_contain_text("Tuned: ")
        expect(page.locator(".gpumem-answer:visible")).to_contain_text("the present settings do not fit")
        apply.click()
        panel.notebook.until("s.settings.batch_size < 128")
        assert panel.notebook.evaluate("s.settings.batch_size * s.settings.accumulation_steps") == 128

        panel.ask("Export")
        expect(page.locator(".gpumem-written")).to_contain_text("train.py")
        script = Path(lab.root / "train.py").read_text()
        compile(script, "train.py", "exec")
        assert "import gpumem_nb" not in script
        expect(page.locator(".gpumem-answer-top:visible")).to_have_count(1)
        expect(apply).to_be_visible()
        panel.ask("Export")
        expect(page.locator(".gpumem-answer-top:visible")).to_have_count(0)
        expect(panel.said).to_have_count(3)

        panel.play()
        panel.wait_for_steps(3)
        panel.pause()
        assert (
            panel.notebook.evaluate("max(x.live_peak_bytes for of in s.history.samples() for x in of)")
            < LIMIT_MIB << 20
        )
    finally:
        panel.notebook.evaluate("s.stop()")
        panel.notebook.close()


@pytest.mark.full
def test_a_search_can_be_stopped_and_a_cell_of_the_map_is_applied(lab: Lab, chrome: Any) -> None:
    panel = _started(lab, chrome)
    page = panel.page
    try:
        panel.choose("batch_size", "16")
        panel.notebook.until("s.settings.batch_size == 16")
        panel.ask("Tune")
        expect(panel.said).to_contain_text("best so far")
        page.locator(".gpumem-said").get_by_role("button", name="Stop").click()
        expect(page.locator(".gpumem-answer:visible")).to_contain_text("It was interrupted")
        form = panel.options()
        page.get_by_label("global batch").fill("7")
        form.get_by_role("button", name="Find the fastest").click()
        expect(panel.said).to_contain_text("A global batch of 7 cannot be split over 2 ranks")
        panel.ask("What fits")
        expect(panel.said.last).to_contain_text(re.compile("bf16|fp16"))  # by then those of fp32 are known
        page.locator(".gpumem-said:visible").last.get_by_role("button", name="Stop").click()
        cell = page.locator(".gpumem-fits-map button[title*='checkpointing=blocks ']").first
        cell.wait_for()
        largest = int(cell.inner_text().split("\n")[0].rstrip("*"))
        cell.click()
        panel.notebook.until(f"(s.settings.batch_size, s.settings.checkpointing) == ({largest}, 'blocks')")
        panel.ask("Ladder")
        expect(panel.said.last).to_contain_text(re.compile("rung 2|Ladder: "))  # by then the first is known
        if (stop := page.locator(".gpumem-said:visible").last.get_by_role("button", name="Stop")).is_visible():
            stop.click()
        rung = page.locator(".gpumem-ladder").get_by_role("button", name=re.compile("^1: "))
        rung.wait_for()
        knob, value = rung.inner_text().removeprefix("1: ").split()[0].split("=")
        rung.click()
        panel.notebook.until(f"str(s.settings.{knob}) == '{value}'")
    finally:
        panel.notebook.evaluate("s.stop()")
        panel.notebook.close()


# Climbing takes minutes where blocks have to be compiled for it.
CLIMBED = """
from gpumem_nb.planning.ladder import Ladder
s.train(1)
rungs = [s.predict(**knobs) for knobs in ({}, {"checkpointing": "blocks"}, {"checkpointing": "sqrt"})]
found = Ladder(rungs[0], tuple(rungs[1:]), s.splits, 12, "", lambda knobs: s.set(**knobs))
s.ladder = lambda **options: found
"""


@pytest.mark.full
def test_the_rung_in_force_is_marked_and_the_next_one_stays_where_it_is(lab: Lab, chrome: Any) -> None:
    start = f"s = gm.start(2, device='cpu', memory_limit='{LIMIT_MIB}MiB')"
    panel = open_panel(lab, chrome, "rungs.ipynb", start, CLIMBED)
    try:
        panel.notebook.run(3)
        panel.ask("Ladder")
        rungs = panel.page.locator(".gpumem-ladder").get_by_role("button")
        expect(rungs).to_have_count(3)
        expect(rungs.nth(0).locator(".fa-check")).to_be_visible()
        before = rungs.nth(2).bounding_box()
        rungs.nth(1).click()
        expect(panel.effect).to_contain_text("checkpointing none → blocks")
        expect(rungs.nth(1).locator(".fa-check")).to_be_visible()
        expect(rungs.locator(".fa-check")).to_have_count(1)
        assert rungs.nth(2).bounding_box() == before
        panel.ask("Ladder")
        expect(rungs.nth(1)).to_be_hidden()
        effect, filling = panel.effect.bounding_box(), panel.filling.bounding_box()
        assert effect
        assert filling
        assert effect["y"] < filling["y"]
    finally:
        panel.notebook.evaluate("s.stop()")
        panel.notebook.close()
