"""The doctor's findings: a button for each flip that fixes something, and its measured effect."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from ..planning.doctor.finding import Diagnosis, Finding, Flip, card
from ..report.speed import FEWEST_STEPS, WARM_UP_STEPS
from ..report.tables import marked, notes_html
from ..shared.answers import Progress
from ..shared.units import format_bytes, format_rate
from . import threads
from .search_view import LoadedThen, SearchView
from .widgets import ApplyButton, Ask, Region, box, region, style_sheet, text_of

if TYPE_CHECKING:
    from ..session import Session

LOOK_EVERY_S = 0.5
WATCHED_S = 120.0  # until there are steps under a flip that was taken
_WAITING = "<p>Changed. It will be measured with the next steps.</p>"
_MEASURED_STEPS = WARM_UP_STEPS + FEWEST_STEPS


@dataclass(eq=False)
class _Card:
    """A finding with a flip; ``taken`` once that was made, ``settled`` once it was measured."""

    flip: Flip
    said: Region
    taken: bool = False
    settled: bool = False


class DiagnosisView:
    """A diagnosis to look at and to act on; shown by being displayed, or by :attr:`view` as part of something else.

    Args:
        session: whose it is.
        diagnosis: what was found.
        ask: has something done; without one, a thread does it and then watches what comes of it. The caller that gives
            one calls :meth:`follow` now and then.
    """

    def __init__(self, session: Session, diagnosis: Diagnosis, ask: Ask | None = None) -> None:
        self._session = session
        self._diagnosis = diagnosis
        self._ask = ask
        self._workload, self._about = session.workload, LoadedThen(session)
        self._cards: list[_Card] = []
        self.view = threads.make(self._make)

    def follow(self) -> bool:
        """Say what came of flips that were taken; says whether there is something left to wait for."""
        for one in self._cards:
            if one.taken and not one.settled:
                self._tell(one)
        return any(one.taken and not one.settled for one in self._cards)

    @property
    def line(self) -> str:
        """Say how many findings there are, and name the worst."""
        findings = self._diagnosis.findings
        if not findings:
            return f"Doctor: {self._diagnosis.headline.partition(':')[0].lower()}."
        return f"Doctor, {len(findings)} finding{'s' * (len(findings) > 1)}: {findings[0].title}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Return the widget, and for a page without a kernel the same without buttons."""
        bundle: dict[str, Any] = dict(self.view._repr_mimebundle_() or {})
        return bundle | {"text/plain": str(self._diagnosis), "text/html": self._diagnosis._repr_html_()}

    def _make(self) -> Any:
        heading = region("gpumem-found", "group", "what the doctor found")
        heading.html = notes_html([self._diagnosis.headline])
        rest = region("gpumem-notes", "group", "what else there is to say")
        rest.html = notes_html([*filter(None, [self._diagnosis.came]), *self._diagnosis.notes])
        css = style_sheet(text_of("answers.css"))
        view = ipywidgets.VBox([css, heading, *map(self._shown, self._diagnosis.findings), rest])
        view.add_class("gpumem-doctor")
        return view

    def _shown(self, finding: Finding) -> Any:
        flip = finding.flip
        about = region("gpumem-about", "group", finding.title)
        about.html = card(finding)
        helps = region("gpumem-what", "group", "what helps")
        helps.html = (_flip(flip) if flip else "") + (f"<p>{marked(finding.do)}</p>" if finding.do else "")
        if not flip:
            return box([about, box([helps], "gpumem-helps")], "gpumem-finding")
        apply = ApplyButton(
            flip.typed,
            f"fixes: {finding.title}; {flip.mathematics}",
            lambda: self._take(one),
            self._ask,
            again=False,
            then=lambda: self._watch(one),
        )
        one = _Card(flip, apply.said)
        self._cards.append(one)
        return box([about, box([apply.button, helps], "gpumem-helps"), apply.said], "gpumem-finding")

    def _take(self, one: _Card) -> str:
        """Make the flip, unless something was changed since it was found."""
        if self._session.settings != one.flip.before or self._about.replaced:
            return "Something was changed since this was found, so it may no longer be true. Examine again."
        self._session.set(**one.flip.changes)
        one.taken = True
        self._tell(one)
        return ""

    def _watch(self, one: _Card) -> None:
        for _ in range(round(WATCHED_S / LOOK_EVERY_S)):
            if one.settled or not one.taken or self._session.ended:
                return
            time.sleep(LOOK_EVERY_S)
            self._tell(one)
        if one.said.html == _WAITING:  # a few steps have left their figures there
            one.said.html = "<p>Changed. Train some steps and examine again to see the effect.</p>"

    def _tell(self, one: _Card) -> None:
        """Say what was measured under the flip, beside what was predicted."""
        flip, now = one.flip, self._session.history.now()
        rescue = self._session.history.rescue
        if rescue and rescue.settings == flip.after and rescue.did:
            one.said.html, one.settled = f"<p>{marked(rescue.headline)} {marked(_sentence(rescue.did))}</p>", True
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


class DoctorView(SearchView):
    """Asks the session what is wrong with it."""

    def __init__(self, session: Session, search: Ask, ask: Ask, close: Callable[[], object]) -> None:
        self._findings: DiagnosisView | None = None
        tip = "what is wrong with this session, what could be better, and how to fix it"
        super().__init__(
            session, "Doctor", [], [("Examine again", "stethoscope", tip, self._examine)], search, ask, close
        )

    def follow(self, why_not: str) -> None:
        """Switch the button off, for a reason, or on; and say what came of flips that were taken."""
        super().follow(why_not)
        if self._findings is not None:
            self._findings.follow()

    def forget(self) -> None:
        """Take the findings away, so that the next press looks anew."""
        self._findings = None
        super().forget()

    def _examine(self, progress: Progress) -> str:
        self._findings = None
        found = DiagnosisView(self._session, self._session.doctor(progress=progress), self.ask)
        self.show([found.view])
        self._findings = found
        return found.line
