"""Shared parts of the panel's longer questions: a form, buttons to begin and stop, progress, and the result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from ..shared.answers import Progress
from ..shared.errors import GpumemError
from .widgets import Ask, box, button, family, region

if TYPE_CHECKING:
    from ..session import Session

Question = Callable[[Progress], str]
"""Asks the session, shows what it answers, and returns what is to be said of it."""


@dataclass(eq=False)
class _Asked:
    """A question whose button was pressed; ``begun`` once it had its turn."""

    question: Question
    begun: bool = False


class SearchView:
    """One question at a time, which may take long and can be stopped.

    Attributes:
        widget: everything.
        ask: has something done at once; if it is refused, the panel says so.

    Args:
        session: whom to ask.
        form: what is to be filled in.
        questions: for each its button's words, icon and tip, and what to ask.
        search: has something done that may take long, on a thread of its own; if that, or what ``ask`` does at once,
            is refused, the panel says so.
    """

    def __init__(
        self,
        session: Session,
        form: Sequence[Any],
        questions: Sequence[tuple[str, str, str, Question]],
        search: Ask,
        ask: Ask,
    ) -> None:
        self._session = session
        self.ask = ask
        self._search = search
        self._stopped = threading.Event()
        self._asked: _Asked | None = None  # until it has ended, or is stopped before its turn
        self._changing = threading.Lock()  # what is asked and what is said of it: buttons have another thread
        self._begin = [
            button(words, icon, tip, partial(self._pressed, question)) for words, icon, tip, question in questions
        ]
        self._stop = button("Stop", "stop", "end it with what was found by then", self._stop_pressed)
        self._stop.layout.display = "none"
        self._said = region("gpumem-searching", "status", "how far it is, and what was found")
        self._found = ipywidgets.VBox([])
        self._found.add_class("gpumem-answer")
        self.widget = ipywidgets.VBox([box([*form, *self._begin, self._stop], "gpumem-form"), self._said, self._found])

    def follow(self, why_not: str) -> None:
        """Switch the buttons off, for a reason, or on."""
        for begin in self._begin:
            begin.disabled = bool(why_not) or self._asked is not None

    def was_opened(self) -> None:
        """Handle that the user opened it, with perhaps nothing to fill in."""

    def press(self) -> None:
        """Ask the first question, as its button does, unless that is switched off."""
        if not self._begin[0].disabled:
            self._begin[0].click()

    def close(self) -> None:
        """End what is under way."""
        self._stopped.set()

    def show(self, found: Sequence[Any]) -> None:
        """Show widgets below."""
        before = self._found.children
        self._found.children = tuple(found)
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
            self._heed("", 0.0)  # before what was found earlier is taken away
            self.show([])
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
        self._said.html = f"<p>{escape(said)}</p>" if said else ""
        self.follow("")

    def _heed(self, what: str, done: float) -> None:
        if self._stopped.is_set():
            raise KeyboardInterrupt

    def _progress(self, what: str, done: float) -> None:
        self._heed(what, done)
        self._said.html = f"<progress value='{done:.3f}' aria-label='done'></progress> {escape(what)}"
