"""The doctor's findings: a button for each flip that fixes something, and its measured effect."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any

import ipywidgets

from ..planning.doctor.diagnosis import Diagnosis, card
from ..planning.doctor.finding import Finding, Flip
from ..report.speed import FEWEST_STEPS, WARM_UP_STEPS
from ..report.tables import notes_html
from ..shared.answers import Progress
from ..shared.errors import GpumemError
from ..shared.units import format_bytes, format_rate
from . import threads
from .controls import box
from .region import Region
from .search_view import Ask, SearchView
from .steered import Steered

LOOK_EVERY_S = 0.5
WATCHED_S = 120.0  # until there are steps under a flip that was taken
_WAITING = "<p>Changed. It will be measured with the next steps.</p>"
_MEASURED_STEPS = WARM_UP_STEPS + FEWEST_STEPS
# The theme's variables, so that a change of theme shows at once; in em, as the panel that may hold it.
CSS = """<style>
.gpumem-doctor { color: var(--jp-ui-font-color1, inherit); line-height: 1.4; overflow: visible; }
.gpumem-doctor .widget-box { overflow: visible; }
.gpumem-doctor .gpumem-finding { display: block; margin: 0 0 0.6em; }
.gpumem-doctor .gpumem-helps { display: flex; flex-wrap: wrap; align-items: center; gap: 0.2em 0.8em;
  padding-left: 1em; }
.gpumem-doctor .gpumem-helps button { flex: none; width: auto; max-width: 100%; height: auto; min-height: 2.1em;
  line-height: 1.4; padding: 0.2em 0.8em; margin: 0; font-size: 1em; white-space: normal; }
.gpumem-doctor button:focus-visible { outline: 3px solid #E69F00; outline-offset: 1px; }
.gpumem-doctor .gpumem-helps p { margin: 0.1em 0; }
.gpumem-doctor .gpumem-came p { margin: 0.1em 0 0.1em 1em; font-weight: 600; }
.gpumem-doctor .gpumem-differs { border: 1px solid currentColor; border-radius: 3px; padding: 0 0.4em; }
.gpumem-doctor .gpumem-css { display: none; }
</style>"""


@dataclass(eq=False)
class _Card:
    """One finding on the page; ``taken`` once its flip was made, ``settled`` once it was measured."""

    finding: Finding
    said: Region = field(default_factory=lambda: _region("gpumem-came", "status", "what came of it"))
    button: Any = None
    taken: bool = False
    settled: bool = False


class DiagnosisView:
    """A diagnosis to look at and to act on; shown by being displayed, or by :attr:`view` as part of something else.

    Attributes:
        view: the widget.

    Args:
        session: whose it is.
        diagnosis: what was found.
        ask: has something done away from the page's own thread; without one, a thread does it and then watches what
            comes of it. The caller that gives one calls :meth:`follow` now and then.
    """

    def __init__(
        self, session: Steered, diagnosis: Diagnosis, ask: Callable[[Callable[[], object]], object] | None = None
    ) -> None:
        self._session = session
        self._diagnosis = diagnosis
        self._ask = ask
        self._workload, self._history = session.workload, session.history
        self._loaded_as = session.history.loaded_as
        self._cards: list[_Card] = []
        self.view = threads.make(self._make)

    def follow(self) -> bool:
        """Say what came of flips that were taken; says whether there is something left to wait for."""
        for one in self._cards:
            if one.taken and not one.settled:
                self._tell(one)
        return any(one.taken and not one.settled for one in self._cards)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the widget, and for a page without a kernel the same without buttons."""
        bundle: dict[str, Any] = dict(self.view._repr_mimebundle_() or {})
        return bundle | {"text/plain": str(self._diagnosis), "text/html": self._diagnosis._repr_html_()}

    def _make(self) -> Any:
        css = ipywidgets.HTML(CSS)
        css.add_class("gpumem-css")
        heading = _region("gpumem-found", "group", "what the doctor found")
        heading.html = notes_html([self._diagnosis.headline])
        rest = _region("gpumem-notes", "group", "what else there is to say")
        rest.html = notes_html([*filter(None, [self._diagnosis.came]), *self._diagnosis.notes])
        self._cards = [_Card(finding) for finding in self._diagnosis.findings]
        view = ipywidgets.VBox([css, heading, *map(self._shown, self._cards), rest])
        view.add_class("gpumem-doctor")
        return view

    def _shown(self, one: _Card) -> Any:
        finding, flip = one.finding, one.finding.flip
        about = _region("gpumem-about", "group", finding.cause)
        about.html = card(finding)
        helps = _region("gpumem-what", "group", "what helps")
        helps.html = (_flip(flip) if flip else "") + (f"<p>{escape(finding.do)}</p>" if finding.do else "")
        row = [helps]
        if flip:
            one.button = ipywidgets.Button(
                description=f"Apply {flip.typed}", tooltip=f"fixes: {finding.cause}; {flip.mathematics}"
            )
            one.button.on_click(lambda _: self._press(one))
            row.insert(0, one.button)
        return box([about, box(row, "gpumem-helps"), one.said], "gpumem-finding")

    def _press(self, one: _Card) -> None:
        one.button.disabled = True
        if self._ask:
            self._ask(partial(self._take, one))
        else:
            threads.start(partial(self._take_and_watch, one), "gpumem_nb doctor")

    def _take(self, one: _Card) -> None:
        """Make the flip, and say why if that cannot be done."""
        flip = one.finding.flip
        assert flip
        one.said.html = "<p>Being changed …</p>"
        now, was = (self._session.settings, self._session.workload), (flip.before, self._workload)
        if now != was or self._session.history.loaded_again(self._history, self._loaded_as):
            one.said.html = (
                "<p>Something was changed since this was found, so it may no longer be true. Examine again.</p>"
            )
            return
        try:
            self._session.set(**flip.changes)
        except GpumemError as refused:
            one.said.html = f"<p>{escape(str(refused))}</p>"
            one.button.disabled = False
        except Exception as error:
            one.said.html = f"<p>That did not work: {escape(f'{type(error).__name__}: {error}')}</p>"
            one.button.disabled = False
        else:
            one.taken = True
            self._tell(one)

    def _take_and_watch(self, one: _Card) -> None:
        self._take(one)
        for _ in range(round(WATCHED_S / LOOK_EVERY_S)):
            if one.settled or not one.taken or self._session.ended:
                return
            time.sleep(LOOK_EVERY_S)
            self._tell(one)
        if one.said.html == _WAITING:  # a few steps have left their figures there
            one.said.html = "<p>Changed. Train some steps and examine again to see the effect.</p>"

    def _tell(self, one: _Card) -> None:
        """Say what was measured under the flip, beside what was predicted."""
        flip, now = one.finding.flip, self._session.history.now()
        assert flip
        rescue = self._session.history.rescue
        if rescue and rescue.settings == flip.after and rescue.did:
            one.said.html, one.settled = f"<p>{escape(rescue.headline)} {escape(_sentence(rescue.did))}</p>", True
            return
        # Beside what was predicted of these settings and this workload, what others came to would say nothing.
        if (self._session.settings, self._session.workload) != (flip.after, self._workload):
            one.said.html, one.settled = "<p>Changed since.</p>", True
            return
        if now is None or now.settings != self._session.settings or not now.steps:
            one.said.html = _WAITING
            return
        one.settled = now.steps >= _MEASURED_STEPS
        came = f"live peak {format_bytes(now.peak_bytes)}"
        if flip.will:
            came += f" (predicted {flip.will.in_words(flip.will.live_peak_bytes)})"
        if one.settled:
            came += f", {format_rate(now.samples_per_s)} samples/s"
            if flip.will and flip.will.samples_per_s:
                came += f" (predicted {format_rate(flip.will.samples_per_s)})"
        one.said.html = f"<p>Changed, measured: {escape(came)}. Examine again for what is left.</p>"


def _flip(flip: Flip) -> str:
    sign = "≠ " if flip.changes_mathematics else ""
    mathematics = f"{sign}{flip.mathematics}"
    look = ' class="gpumem-differs"' if flip.changes_mathematics else ""
    return f"<p>{escape(flip.brings)}; <span{look}>{escape(mathematics)}</span></p>"


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _region(css_class: str, role: str, label: str) -> Region:
    region = Region(role=role, label=label)
    region.add_class(css_class)
    return region


class DoctorView(SearchView):
    """Asks the session what is wrong with it.

    Args:
        session: whom to ask.
        search: has something done that may take long.
        ask: the same of what is done at once.
    """

    def __init__(self, session: Steered, search: Ask, ask: Ask) -> None:
        self._findings: DiagnosisView | None = None
        tip = "what is wrong with this session, what could be better, and how to fix it"
        super().__init__(session, [], [("Examine", "stethoscope", tip, self._examine)], search, ask)

    def was_opened(self) -> None:
        """There is nothing to fill in: the first time it examines at once."""
        if self._findings is None:
            self.press()

    def follow(self, why_not: str) -> None:
        """Switch the button off, for a reason, or on; and say what came of flips that were taken."""
        super().follow(why_not)
        if self._findings is not None:
            self._findings.follow()

    def _examine(self, progress: Progress) -> str:
        self._findings = None
        found = DiagnosisView(self._session, self._session.doctor(progress=progress), self.ask)
        self.show([found.view])
        self._findings = found
        return ""
