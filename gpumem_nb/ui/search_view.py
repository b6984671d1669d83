"""Shared parts of the panel's longer questions: a form, buttons to begin and stop, progress, and the result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from ..report.tables import marked
from ..shared.answers import Progress
from ..shared.errors import GpumemError
from .widgets import Ask, box, button, family, region, toggle

if TYPE_CHECKING:
    from ..session import Session

Question = Callable[[Progress], str]
"""Asks the session, shows what it answers, and returns what is to be said of it."""


@dataclass(eq=False)
class _Asked:
    """A question whose button was pressed; ``begun`` once it had its turn."""

    question: Question
    begun: bool = False


class LoadedThen:
    """What a session had loaded when this was made."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._workload, self._history = session.workload, session.history
        self._loaded_as = session.history.loaded_as

    @property
    def replaced(self) -> bool:
        """Return whether something else was loaded since; the end of the ranks and a restart do not count."""
        other = self._session.workload not in (None, self._workload)
        return other or self._session.history.loaded_again(self._history, self._loaded_as)


class SearchView:
    """One question at a time, which begins when the view is opened, may take long, and can be stopped.

    Closed, it keeps one line: what was said last, and what there is to press about that. Both go when something else is
    loaded.

    Attributes:
        widget: everything.
        ask: has something done at once; if it is refused, the panel says so.

    Args:
        session: whom to ask.
        title: what it is called.
        form: what may be filled in, behind a button.
        questions: for each its button's words, icon and tip, and what to ask. The first is asked when it is opened.
        search: has something done that may take long, on a thread of its own; if that, or what ``ask`` does at once,
            is refused, the panel says so.
        ask: as the attribute.
        close: closes it, as the panel does when another is opened.
    """

    def __init__(
        self,
        session: Session,
        title: str,
        form: Sequence[Any],
        questions: Sequence[tuple[str, str, str, Question]],
        search: Ask,
        ask: Ask,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._session = session
        self.ask = ask
        self._search = search
        self._stopped = threading.Event()
        self._about: LoadedThen | None = None  # what the answer is about
        self._asked: _Asked | None = None  # until it has ended, or is stopped before its turn
        self._changing = threading.RLock()  # what is asked and what is said of it: buttons have another thread
        self._begin = [
            button(words, icon, tip, partial(self._pressed, question)) for words, icon, tip, question in questions
        ]
        self._stop = button("Stop", "stop", "end it with what was found by then", self._stop_pressed)
        self._stop.layout.display = "none"
        self._said = region("gpumem-searching", "status", "how far it is, and what was found")
        self._line = box([], "gpumem-line")
        self._found = ipywidgets.VBox([])
        self._found.add_class("gpumem-answer")
        self._options = toggle("options", "sliders", "what it goes by, and to ask again")
        self._form = box([*form, *self._begin], "gpumem-form")
        self._form.layout.display = "none"
        self._options.observe(self._unfold, names="value")
        heading = region("gpumem-heading", "heading", "")
        heading.html = f"<b>{escape(title)}</b>"
        closing = button("", "times", "close: one line stays", close)
        closing.add_class("gpumem-close-answer")
        self._top = box([heading, self._options, closing], "gpumem-answer-top")
        self.is_open = False
        parts = [self._top, self._form, box([self._said, self._stop, self._line], "gpumem-said"), self._found]
        self.widget = ipywidgets.VBox(parts)
        self.widget.add_class("gpumem-view")
        self._fold()

    def open(self) -> None:
        """Show all of it, and ask, unless something is being asked or an answer stands there."""
        self.is_open = True
        self._fold()
        if self._asked is None and not self._found.children:
            self.press()

    def fold(self) -> None:
        """Leave one line of it; what is being asked goes on."""
        self.is_open = False
        self._fold()

    def follow(self, why_not: str) -> None:
        """Switch the buttons off, for a reason, or on; take an answer away that is about something else."""
        for begin in self._begin:
            begin.disabled = bool(why_not) or self._asked is not None
        with self._changing:
            if self._asked is None and self._about is not None and self._about.replaced:
                self.forget()

    def forget(self) -> None:
        """Take the answer away, so that the next press asks anew."""
        self._about, self._said.html = None, ""
        self.show([])
        self.keep([])
        self.fold()

    def press(self) -> None:
        """Ask the first question, as its button does, unless that is switched off."""
        if not self._begin[0].disabled:
            self._begin[0].click()

    def close(self) -> None:
        """End what is under way."""
        self._stopped.set()

    def keep(self, widgets: Sequence[Any]) -> None:
        """Show widgets beside the line that stays when it is closed."""
        self._replace(self._line, widgets)

    def _fold(self) -> None:
        self._top.layout.display = self._found.layout.display = "" if self.is_open else "none"
        self._form.layout.display = "" if self.is_open and self._options.value else "none"
        self.widget.layout.display = "" if self.is_open or self._said.html else "none"
        (self.widget.add_class if self.is_open else self.widget.remove_class)("gpumem-open")

    def _unfold(self, _: object) -> None:
        self._fold()

    def show(self, found: Sequence[Any]) -> None:
        """Show widgets below."""
        self._replace(self._found, found)

    def _replace(self, place: Any, found: Sequence[Any]) -> None:
        before = place.children
        place.children = tuple(found)
        for widget in before:
            for one in family(widget):
                one.close()

    def _pressed(self, question: Question) -> None:
        asked = _Asked(question)
        with self._changing:
            if self._asked is not None:
                return
            self._asked = asked
            self._stopped.clear()
            self.follow("")
            self._stop.layout.display = ""
            self._said.html = "<p>Waiting for the question before it …</p>"  # until it has its turn
        self._search(lambda: self._do(asked))

    def _stop_pressed(self) -> None:
        self._stopped.set()
        with self._changing:
            if self._asked is None:  # it has ended meanwhile, and what it found stays
                return
            if self._asked.begun:
                self._said.html = "<p>Stopping …</p>"
            else:
                self._end("Stopped.")

    def _do(self, asked: _Asked) -> None:
        with self._changing:
            if self._asked is not asked:  # it was stopped before its turn
                return
            asked.begun = True
        said = ""
        try:
            self._about = LoadedThen(self._session)
            self._heed("", 0.0)  # before what was found earlier is taken away
            self.show([])
            self.keep([])
            with self._session.telling(self._heed):  # Stop is heard while ranks are waited for, too
                said = asked.question(self._progress)
        except KeyboardInterrupt as why:
            said = str(why) or "Stopped."
        except GpumemError as error:
            said = str(error)
        finally:
            with self._changing:
                self._end(said)

    def _end(self, said: str) -> None:
        """Nothing is asked any more, and the next question may be."""
        self._asked = None
        self._stop.layout.display = "none"
        self._said.html = f"<p>{marked(said)}</p>" if said else ""
        self.follow("")
        self._fold()

    def _heed(self, what: str, done: float) -> None:
        if self._stopped.is_set():
            raise KeyboardInterrupt

    def _progress(self, what: str, done: float) -> None:
        self._heed(what, done)
        self._said.html = f"<progress value='{done:.3f}' aria-label='done'></progress> {escape(what)}"
