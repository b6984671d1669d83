"""Two ranks and their panel in a real browser, until JupyterLab is stopped; the tests share one session."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from playwright.sync_api import Browser, Locator, expect

from gpumem_nb.shared.categories import CATEGORIES
from tests.internals import folders_expression
from tests.tiers import every, first_tier
from tests.timing import HANG_S, until

from .lab import TIMEOUT_S, Lab
from .layout import expect_tidy, size
from .panel_page import LOAD_PLOTLY_SLOWLY, SET_DEFAULTS, SHOWN, PanelPage, began, open_panel, tried

pytestmark = pytest.mark.browser

LIMIT_MIB = 96
BUSY_CELL = """
import pathlib, time
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""

SLOW = "import time; late = model.register_forward_pre_hook(lambda *_: time.sleep(0.1))"
CELLS = (BUSY_CELL, "%load_ext gpumem_nb\n%hvd_memory --by module --timeline", "s.panel().dock();")


@pytest.fixture(scope="module")
def panel(lab: Lab, chrome: Browser) -> Iterator[PanelPage]:
    start = f"s = gm.start(2, device='cpu', memory_limit='{LIMIT_MIB}MiB')"
    panel = open_panel(lab, chrome, "two.ipynb", start, *CELLS)
    yield panel
    panel.notebook.close()


@pytest.fixture(autouse=True)
def paused(panel: PanelPage) -> None:
    """Training is paused when a test begins, even if the one before has failed."""
    panel.notebook.evaluate("s.ended or s.pause()")


def test_play_advances_steps_and_draws_every_chart(panel: PanelPage) -> None:
    expect(panel.status).to_contain_text("press Play")
    panel.play()
    panel.wait_for_steps(3)
    expect(panel.status).to_contain_text("Training digits-resnet on 2 ranks")
    panel.pause()
    for axis, traces in (("x2", 2), ("x3", 1), ("x4", 1)):
        shown = panel.traces(axis)
        assert len(shown) == traces
        for trace in shown:
            assert len(trace["x"]) == len(trace["y"]) > 2
            assert min(trace["y"]) > 0
    bars = {trace["name"]: trace["y"] for trace in panel.traces("x")}
    assert list(bars) == [*CATEGORIES, "categories not known yet", "reserved", "live now", "limit"]
    assert bars["limit"] == [96, 96]
    steps = panel.steps()
    panel.press("Step")
    panel.wait_for_steps(1)
    expect(panel.status).to_contain_text(f"Paused at step {steps + 1}")


@pytest.fixture
def straggler(panel: PanelPage) -> Iterator[None]:
    """Rank 1 takes so long that the panel says so."""
    panel.notebook.evaluate(f"s.run({SLOW!r}, ranks=1) and s.train(8) and None")
    yield
    panel.notebook.evaluate("s.run('late.remove()', ranks=1) and None")


@pytest.mark.usefixtures("straggler")
@pytest.mark.parametrize("width", first_tier([1366, 700, 1024, 1900, 2200], every(3)))
def test_everything_fits_one_screen_and_nothing_covers_anything(panel: PanelPage, width: int) -> None:
    page = panel.page
    expect(page.locator(".gpumem-panel .gpumem-tiles").get_by_text(" % waiting for rank 1")).to_be_visible()
    before = page.viewport_size
    panel.fold()
    try:
        page.set_viewport_size({"width": width, "height": 1500})
        if width == 700:
            page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
        expect_tidy(panel)
        assert size(panel)[1] <= 600
    finally:
        if width == 700:
            page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")
        page.set_viewport_size(before or {"width": 1400, "height": 900})


def test_every_control_changes_what_the_ranks_measure(panel: PanelPage) -> None:
    peaks = {"none": panel.notebook.evaluate("s.history.tried[-1].peak_bytes")}
    panel.play()
    for knob, value in (
        ("checkpointing", "blocks"),
        ("precision", "bf16"),
        ("batch_size", "64"),
        ("accumulation_steps", "2"),
    ):
        panel.choose(knob, value)
        panel.notebook.until(f"str(s.history.tried[-1].settings.{knob}) == '{value}' and s.history.tried[-1].steps > 3")
        peaks[value] = panel.notebook.evaluate("s.history.tried[-1].peak_bytes")
        ids = "{rank[-1].settings_id for rank in s.history.samples(1)}"
        assert panel.notebook.evaluate(f"{ids} == {{s.history.tried[-1].settings_id}}")
    panel.pause()
    assert peaks["blocks"] < 0.8 * peaks["none"]
    assert peaks["bf16"] < peaks["blocks"]
    assert peaks["64"] > 1.05 * peaks["bf16"]
    assert peaks["2"] >= peaks["64"]


def test_before_and_after_agree_with_history_and_chart(panel: PanelPage) -> None:
    panel.play()
    panel.choose("batch_size", "16")
    panel.notebook.until("s.history.tried[-1].settings.batch_size == 16 and s.history.tried[-1].steps > 3")
    panel.pause()
    now = tried(panel)
    expect(panel.effect).to_contain_text(str(now["flip"]))
    expect(panel.effect).to_contain_text(f"live peak {now['memory']}")
    expect(panel.effect).to_contain_text(str(now["speed"]))
    first = began(panel)
    drawn = [y for trace in panel.traces("x2") for x, y in zip(trace["x"], trace["y"], strict=True) if x >= first and y]
    assert max(drawn) == pytest.approx(now["peak"] / 2**20, rel=1e-6)  # type: ignore[operator]
    expect(panel.marks.get_by_text("batch 16", exact=True)).to_be_visible()


def test_stacks_add_up_to_the_peak_and_the_words_name_the_largest_part(panel: PanelPage) -> None:
    at_peak = panel.notebook.evaluate(
        "[next(x.ledger.at_peak for x in reversed(of_rank) if x.ledger) for of_rank in s.history.samples()]"
    )
    bars = {trace["name"]: trace["y"] for trace in panel.traces("x")}
    for rank, categories in enumerate(at_peak):
        drawn = {name: bars[name][rank] * 2**20 for name in CATEGORIES}
        assert drawn == pytest.approx({name: categories.get(name, 0) for name in CATEGORIES})
    worst = max(at_peak, key=lambda categories: sum(categories.values()))
    largest = max(worst, key=lambda name: worst[name])
    share = 100 * worst[largest] / sum(worst.values())
    expect(panel.filling).to_contain_text(f"{largest[:1].upper()}{largest[1:]} fill")
    expect(panel.filling).to_contain_text(f"{share:.0f} %")
    expect(panel.marks.get_by_text(f"{largest} {worst[largest] / 2**20:.3g}")).to_be_visible()


@pytest.mark.full
@pytest.mark.parametrize(
    ("knob", "value", "band", "way"),
    [
        ("precision", "bf16", "activations", -1),
        ("checkpointing", "blocks", "activations", -1),
        ("optimizer", "sgd", "optimizer state", -1),
        ("accumulation_steps", "2", "gradients", 1),
    ],
)
def test_a_flip_moves_the_right_band(panel: PanelPage, knob: str, value: str, band: str, way: int) -> None:
    panel.notebook.evaluate(SET_DEFAULTS)
    panel.play()
    panel.notebook.until("s.history.tried[-1].steps > 1")
    panel.wait_for_bands(began(panel))
    before = panel.bands()[band][-1]
    panel.choose(knob, value)
    panel.notebook.until(f"str(s.history.tried[-1].settings.{knob}) == '{value}' and s.history.tried[-1].steps > 1")
    panel.wait_for_bands(began(panel))
    panel.pause()
    after = panel.bands()[band][-1]
    assert way * (after - before) > 0.2 * before


@pytest.mark.full
@pytest.mark.parametrize(("value", "says"), [("-3", "whole number of at least 1"), ("5000", "larger than the dataset")])
def test_a_batch_size_that_cannot_be_is_explained_and_taken_back(panel: PanelPage, value: str, says: str) -> None:
    before = panel.notebook.evaluate("s.settings.batch_size")
    panel.choose("batch_size", value)
    expect(panel.error("batch_size")).to_contain_text(says)
    expect(panel.error("batch_size")).to_contain_text(f"{value}: ")
    expect(panel.error("batch_size")).to_have_attribute("role", "alert")
    expect(panel.control("batch_size")).to_have_value(str(before))
    assert panel.notebook.evaluate("s.settings.batch_size") == before
    panel.choose("accumulation_steps", "2" if panel.control("accumulation_steps").input_value() == "1" else "1")
    expect(panel.error("batch_size")).to_have_text("")


def test_panel_lives_and_its_controls_work_while_a_cell_runs(panel: PanelPage, lab: Lab) -> None:
    panel.notebook.evaluate("s.set(accumulation_steps=2) and None")
    panel.play()
    panel.wait_for_steps(2)
    panel.pause()
    cell = panel.notebook.run(3, wait=False)
    expect(cell.locator(".jp-InputPrompt")).to_contain_text("*")
    try:
        panel.play()
        panel.wait_for_steps(2)
        panel.choose("accumulation_steps", "1")
        expect(panel.effect).to_contain_text("accumulation_steps 2 → 1")
        expect(panel.effect).to_contain_text("samples/s")
        panel.pause()
        expect(cell.locator(".jp-InputPrompt")).to_contain_text("*")
    finally:
        (lab.root / "go").touch()
    expect(cell.locator(".jp-InputPrompt")).not_to_contain_text("*")
    assert panel.notebook.evaluate("s.settings.accumulation_steps") == 1


@pytest.mark.full
def test_a_memory_report_has_figures_beside_its_tables_and_saves_them(panel: PanelPage, lab: Lab) -> None:
    cell = panel.notebook.run(4)
    expect(cell.locator(".js-plotly-plot")).to_have_count(2)
    expect(cell.locator(".js-plotly-plot .gtitle").first).to_contain_text("Step")
    expect(cell.locator(".js-plotly-plot .treemaplayer")).to_have_count(2)
    expect(cell.locator(".jp-RenderedHTML")).to_contain_text("At the peak of rank")
    panel.page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    outputs = (output["data"] for output in nbformat.read(lab.root / "two.ipynb", 4).cells[4].outputs)
    saved = [data for data in outputs if list(data) != ["text/plain"]]  # without progress, where it took long
    assert ["application/vnd.plotly.v1+json" in data for data in saved] == [True, True, False]
    assert "<table" in saved[2]["text/html"]


def test_a_saved_notebook_keeps_what_was_tried(panel: PanelPage, lab: Lab) -> None:
    panel.notebook.evaluate("s.set(batch_size=24) and None")
    panel.play()
    panel.wait_for_steps(2)
    panel.pause()
    kept = panel.page.locator(".jp-CodeCell").nth(2).locator(".jp-RenderedHTMLCommon table")
    expect(kept).to_contain_text("24×")
    panel.page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    widget, static = [output["data"] for output in nbformat.read(lab.root / "two.ipynb", 4).cells[2].outputs]
    assert "application/vnd.jupyter.widget-view+json" in widget
    assert "<table" in static["text/html"]
    assert static["image/svg+xml"].startswith("<svg")
    assert "24×" in static["text/plain"]


@pytest.mark.full
def test_a_slow_page_draws_the_charts_and_what_it_has_missed(panel: PanelPage) -> None:
    page = panel.page
    page.evaluate(LOAD_PLOTLY_SLOWLY)
    panel.notebook.evaluate("s.panel().close()")
    panel.notebook.run(2)
    steps = panel.notebook.evaluate("s.train(3) and s.history.steps")  # before the page listens to the charts
    panel.wait_until_shown()
    page.wait_for_function(f"{SHOWN}?._fullData?.find(t => t.xaxis === 'x3')?.x?.at(-1) === {steps}")


def test_controls_follow_changes_made_in_cells(panel: PanelPage) -> None:
    panel.notebook.evaluate("s.set(precision='fp32', clip_norm=0.5) and None")
    expect(panel.control("precision")).to_have_value("fp32")
    expect(panel.control("clip_norm")).to_have_value("0.5")
    panel.notebook.evaluate("s.set(clip_norm=None) and None")
    expect(panel.control("clip_norm")).to_have_value("none")


@pytest.mark.full
def test_ranks_that_take_long_are_named(panel: PanelPage, lab: Lab) -> None:
    busy = lab.root / "busy"
    busy.touch()
    try:
        cell = f"import pathlib, time\nwhile pathlib.Path({str(busy)!r}).exists(): time.sleep(0.02)"
        run = f"{{'target': s.run, 'args': ({cell!r},), 'kwargs': {{'ranks': [1]}}}}"
        panel.notebook.evaluate(f"__import__('threading').Thread(**{run}).start()")
        panel.play()
        expect(panel.status).to_contain_text("Rank 1 is in a cell, rank 0 waits in the gradient reduction of step")
    finally:
        busy.unlink()
    panel.wait_for_steps(1)
    expect(panel.status).to_contain_text("Training")
    panel.pause()


def test_out_of_memory_is_explained_survived_and_taken_back(panel: PanelPage) -> None:
    panel.notebook.evaluate(SET_DEFAULTS)
    panel.play()
    panel.wait_for_steps(2)
    panel.insist("batch_size", "300")
    expect(panel.alert).to_contain_text("ran out of memory")
    expect(panel.alert).to_contain_text("went back to batch_size=32")
    expect(panel.control("batch_size")).to_have_value("32")
    panel.wait_for_steps(2)
    expect(panel.marks.get_by_text("OOM batch 300")).to_be_visible()
    panel.page.locator(".gpumem-panel .gpumem-fits button").first.click()  # Apply: what was tried out and fits
    expect(panel.effect).to_contain_text("batch_size 32 → ")
    assert panel.notebook.evaluate("s.settings.samples_per_rank") >= 300
    expect(panel.alert).to_have_text("")
    panel.notebook.evaluate(SET_DEFAULTS)
    expect(panel.control("batch_size")).to_have_value("32")  # what comes while one types takes the place of that
    panel.wait_for_steps(2)
    panel.insist("batch_size", "300")
    expect(panel.alert).to_contain_text("would have fit")
    until(lambda: [attempt > LIMIT_MIB for attempt in panel.attempts()] == [True], panel.attempts)
    panel.page.keyboard.press("Escape")
    expect(panel.alert).to_have_text("")
    until(lambda: not panel.attempts(), panel.attempts)
    panel.pause()


def test_a_reloaded_page_shows_the_same_and_goes_on(panel: PanelPage) -> None:
    steps, peaks = panel.steps(), panel.traces("x2")
    chosen = panel.control("checkpointing").input_value()
    panel.notebook.reload()
    panel.wait_until_shown()
    panel.wait_until_paused()
    assert panel.steps() == steps
    assert panel.traces("x2") == peaks
    assert panel.control("checkpointing").input_value() == chosen
    panel.play()
    panel.wait_for_steps(2)
    panel.page.wait_for_function(f"{SHOWN}._fullData.find(t => t.xaxis === 'x3').x.at(-1) > {steps}")
    panel.pause()


@pytest.mark.full
def test_theme_switch_recolours_text_and_grid_at_once(panel: PanelPage) -> None:
    def colour(part: Locator, name: str) -> str:
        # Charts are drawn anew at any moment: what has just left the page has no style.
        return until(lambda: str(part.evaluate("(element, name) => getComputedStyle(element)[name]", name)))

    parts = {
        "fill": panel.page.locator(".gpumem-panel .ytick text").first,
        "stroke": panel.page.locator(".gpumem-panel .gridlayer path").first,
        "color": panel.status,
    }
    light = {name: colour(part, name) for name, part in parts.items()}
    # A theme's name is there a moment before its colours.
    panel.notebook.theme("JupyterLab Dark")
    for name, part in parts.items():
        expect(part).not_to_have_css(name, light[name])
    panel.notebook.theme("JupyterLab Light")
    for name, part in parts.items():
        expect(part).to_have_css(name, light[name])


@pytest.mark.full
def test_knobs_of_communication_are_unfolded_and_tell_what_they_did(panel: PanelPage) -> None:
    panel.notebook.evaluate(f"{SET_DEFAULTS} or s.train(6) and None")
    panel.choose("compression", "fp16")
    panel.notebook.evaluate("s.train(6) and None")
    expect(panel.effect).to_contain_text(re.compile(r"of communication hidden, .* of gradients"))
    panel.unfold()
    expect(panel.page.locator(".gpumem-panel .gpumem-heading").get_by_text("Communication")).to_be_visible()
    panel.notebook.evaluate(SET_DEFAULTS)


def test_a_panel_docks_beside_the_notebook_and_is_closed_everywhere(panel: PanelPage) -> None:
    shown = panel.page.locator(".jp-LinkedOutputView .gpumem-status, .jp-MainAreaWidget .gpumem-status")
    try:
        for _ in range(2):  # docked again, it is there once
            panel.notebook.run(5)
        expect(shown).to_have_count(2)
        expect_tidy(panel)
    finally:  # the tests after this one want one panel
        panel.notebook.clear_outputs()
    expect(panel.page.locator(".gpumem-panel")).to_have_count(1)
    steps = panel.notebook.evaluate("s.train(2) and s.history.steps")  # what is left is drawn on
    panel.page.wait_for_function(f"{SHOWN}._fullData.find(t => t.xaxis === 'x3').x.at(-1) === {steps}")
    panel.notebook.evaluate("s.panel().close()")
    expect(panel.page.locator(".gpumem-panel")).to_have_count(0)
    panel.notebook.run(2)
    panel.wait_until_shown()


def test_a_stopped_session_says_so_and_a_restarted_one_goes_on(panel: PanelPage) -> None:
    panel.notebook.evaluate("s.stop()")
    expect(panel.status).to_contain_text("Stopped. Press Restart to go on with what was trained")
    expect(panel.control("precision")).to_be_disabled()
    panel.press("Restart")
    expect(panel.status).to_contain_text(re.compile("Paused|press Play"))
    expect(panel.control("precision")).to_be_enabled()
    panel.play()
    panel.wait_for_steps(2)
    panel.pause()


def test_a_closed_browser_leaves_the_ranks_and_a_stopped_jupyterlab_leaves_nothing(panel: PanelPage, lab: Lab) -> None:
    panel.play()
    panel.wait_for_steps(2)
    steps = panel.notebook.evaluate("s.history.steps")
    panel.page.close()
    deadline = time.monotonic() + TIMEOUT_S
    while panel.notebook.evaluate("s.history.steps") <= steps:
        assert time.monotonic() < deadline, "training must go on without a browser"
    folders = panel.notebook.evaluate(folders_expression("s"))
    assert all(Path(folder).exists() for folder in folders)
    family = lab.process.children(recursive=True)
    assert len([process for process in family if "ipyparallel" in " ".join(process.cmdline())]) >= 3
    lab.process.terminate()
    _, alive = psutil.wait_procs(family, timeout=HANG_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    until(lambda: not any(Path(folder).exists() for folder in folders), lambda: folders)  # removed when all have ended
