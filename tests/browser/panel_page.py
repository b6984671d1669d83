"""The panel as somebody in front of the browser sees and uses it."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, expect

from .lab import Lab, Notebook

SHOWN = "[...document.querySelectorAll('.gpumem-panel .js-plotly-plot')].find(one => !one.closest('.gpumem-answer'))"
SET_DEFAULTS = "s.set(**__import__('gpumem_nb').Settings().changed_from(s.settings)) and None"
ATTEMPT = "out of memory"  # what the markers of peaks that were too high are called
POLLING_MS = 50  # playwright's own polling lays the page out anew for every frame
STEPS = "+document.querySelector('.gpumem-steps')?.innerText.replaceAll(',', '')"
# Plotly, the one large script that a widget brings, takes a second longer to load than a page gives to widgets.
LOAD_PLOTLY_SLOWLY = """() => {
    globalThis.gpumemPlotly?.clear();  // which the page has loaded
    const usual = URL.createObjectURL.bind(URL);
    URL.createObjectURL = script => {
        const url = usual(script);
        if (script.size < 1e6) return url;
        const slowly = `await new Promise(done => setTimeout(done, 3000));
            export default (await import(${JSON.stringify(url)})).default;`;
        return usual(new Blob([slowly], { type: 'text/javascript' }));
    };
}"""


def named(words: str) -> re.Pattern[str]:
    """What a button with these words is called: its icon is a letter of the name, too."""
    return re.compile(rf"(^|\W){re.escape(words)}$")


class PanelPage:
    """The panel in a notebook."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.page = notebook.page

    def wait_until_shown(self) -> None:
        """Controls and charts are there."""
        self.page.locator(".gpumem-panel .js-plotly-plot").first.wait_for()
        self.page.wait_for_function(f"{SHOWN}.data?.length > 0")

    def press(self, button: str) -> None:
        """Press one of the buttons at the top; those that are folded away are unfolded before."""
        if button not in ("Play", "Pause", "Restart"):
            self.unfold()
        where = ".gpumem-panel .gpumem-top, .gpumem-panel .gpumem-choices"
        self.page.locator(where).get_by_role("button", name=named(button)).click()

    def unfold(self) -> None:
        """Show the further knobs."""
        if not self.page.locator(".gpumem-panel .gpumem-more").first.is_visible():
            self.page.locator(".gpumem-panel .gpumem-show-more").first.click()
            self.page.locator(".gpumem-panel .gpumem-more").first.wait_for()

    def fold(self) -> None:
        """Show the further knobs no more."""
        if self.page.locator(".gpumem-panel .gpumem-more").first.is_visible():
            self.page.locator(".gpumem-panel .gpumem-show-more").first.click()
            self.page.locator(".gpumem-panel .gpumem-more").first.wait_for(state="hidden")

    def ask(self, answer: str) -> None:
        """Press the button of one of the panel's answers, which opens it and asks, or closes it."""
        self.page.locator(".gpumem-answers").get_by_role("button", name=named(answer)).click()

    def options(self) -> Locator:
        """Unfold what the answer that is open goes by."""
        self.page.locator(".gpumem-answer-top:visible").get_by_role("button", name="options").click()
        return self.page.locator(".gpumem-form:visible")

    @property
    def said(self) -> Locator:
        """The lines of answers that are shown, or how far they are."""
        return self.page.locator(".gpumem-panel .gpumem-searching:visible")

    def play(self) -> None:
        """Press Play and wait until it has happened."""
        self.press("Play")
        expect(self.status).not_to_contain_text(re.compile("Paused|press Play"))

    def pause(self) -> None:
        """Press Pause and wait until it has happened and the last step is drawn."""
        self.press("Pause")
        self.wait_until_paused()

    def wait_until_paused(self) -> None:
        """Words, numbers and charts are at the same step: they come one after the other."""
        expect(self.status).to_contain_text("Paused at step")
        self.page.wait_for_function(
            f"""() => {{
                const at = +document.querySelector('.gpumem-status').innerText.match(/Paused at step (\\d+)/)?.[1];
                return {STEPS} === at && {SHOWN}?._fullData?.find(t => t.xaxis === 'x3')?.x?.at(-1) === at;
            }}""",
            polling=POLLING_MS,
        )

    def choose(self, knob: str, value: str) -> None:
        """Set a control as a person would: choose a word, or type a number and press Enter."""
        control = self.control(knob)
        if control.evaluate("element => element.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)
            control.press("Enter")

    def insist(self, knob: str, value: str) -> None:
        """Choose a value that may be known not to fit, which the panel says once, and choose it again."""
        self.choose(knob, value)
        warned = self.error(knob).filter(has_text="Choose it again")
        expect(self.alert.filter(has_text="out of memory").or_(warned)).to_have_count(1)
        if warned.count():
            self.choose(knob, value)

    def control(self, knob: str) -> Locator:
        """The control of a knob; one that is folded away is unfolded before."""
        control = self.page.locator(f".gpumem-panel .gpumem-knob-{knob}").locator("select, input").first
        if not control.is_visible():
            self.unfold()
        return control

    @property
    def status(self) -> Locator:
        return self.page.locator(".gpumem-panel .gpumem-status")

    @property
    def alert(self) -> Locator:
        return self.page.locator(".gpumem-panel .gpumem-alert")

    @property
    def filling(self) -> Locator:
        return self.page.locator(".gpumem-panel .gpumem-filling")

    @property
    def effect(self) -> Locator:
        return self.page.locator(".gpumem-panel .gpumem-effect")

    @property
    def marks(self) -> Locator:
        """The words of charts, also of what was changed where."""
        return self.page.locator(".gpumem-panel .annotation-text")

    @property
    def tip(self) -> Locator:
        """What explains the knob that has the focus."""
        return self.page.locator(".gpumem-panel .gpumem-tip")

    def error(self, knob: str) -> Locator:
        """What is said at a knob's control about what was typed there."""
        return self.page.locator(f".gpumem-panel .gpumem-knob-{knob} .gpumem-error")

    def foreseen(self, knob: str, value: str) -> Locator:
        """The row of one of a knob's values, once it was predicted; the knob gets the focus."""
        self.control(knob).focus()
        row = self.tip.locator(".gpumem-flip").filter(has=self.page.get_by_text(value, exact=True))
        expect(row.locator("em")).not_to_have_text("…")
        return row

    def steps(self) -> int:
        """The step number shown."""
        return int(self.page.locator(".gpumem-steps").last.inner_text().replace(",", ""))

    def wait_for_steps(self, more: int) -> None:
        """Wait until the step number shown has grown, without asking the kernel."""
        self.page.wait_for_function(
            f"at => {STEPS} >= at",
            arg=self.steps() + more,
            polling=POLLING_MS,
        )

    def traces(self, axis: str) -> list[dict[str, Any]]:
        """What a chart shows now: name, x and y of each bar or line on this x axis."""
        return self._traces(f"t.xaxis === axis && !t.stackgroup && t.name !== '{ATTEMPT}'", axis)

    def attempts(self) -> list[float]:
        """The peaks that were too high, as far as they are drawn, in the chart's unit."""
        return [y for trace in self._traces(f"t.name === '{ATTEMPT}'", "") for y in trace["y"] or []]

    def bands(self) -> dict[str, list[float]]:
        """The stacked categories of the worst rank, at the steps that were recorded."""
        return {trace["name"]: trace["y"] for trace in self._traces("t.stackgroup", "")}

    def wait_for_bands(self, step: int) -> None:
        """Wait until a step from this one on was recorded and drawn; the last point repeats the one before it."""
        self.page.wait_for_function(
            f"step => {SHOWN}._fullData.find(t => t.stackgroup)?.x?.at(-2) >= step", arg=step, polling=POLLING_MS
        )

    def _traces(self, which: str, axis: str) -> list[dict[str, Any]]:
        traces: list[dict[str, Any]] = self.page.evaluate(
            f"axis => {SHOWN}._fullData.filter(t => t.visible && {which})"
            ".map(t => ({name: t.name, x: Array.from(t.x), y: Array.from(t.y)}))",
            axis,
        )
        return traces


def open_panel(lab: Lab, browser: Any, name: str, start: str, *more_cells: str) -> PanelPage:
    """Start ranks, load the digits and show the panel, each in a cell of a new notebook."""
    lab.write(name, [f"import gpumem_nb as gm\n{start}", "s.load('digits-resnet');", "s.panel()", *more_cells])
    notebook = lab.open(browser, name)
    for cell in range(3):
        said = notebook.run(cell).inner_text()
        assert "Traceback" not in said, said
    panel = PanelPage(notebook)
    panel.wait_until_shown()
    return panel


def tried(panel: PanelPage) -> dict[str, object]:
    """The latest configuration that was trained."""
    value = panel.notebook.evaluate(
        "(lambda t: {'peak': t.peak_bytes, 'memory': s.history.effect().memory, 'speed': s.history.effect().speed,"
        " 'flip': s.history.effect().flip})(s.history.tried[-1])"
    )
    assert isinstance(value, dict)
    return value


def began(panel: PanelPage) -> int:
    """A step under the latest configuration, the first one or a later one."""
    step = panel.notebook.evaluate("1 - s.history.tried[-1].steps + s.history.steps")
    assert isinstance(step, int)
    return step
