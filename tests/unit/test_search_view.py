"""The panel's longer questions: one at a time, in their turn, and stopped whenever somebody presses Stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ipywidgets
import pytest

from gpumem_nb.kernel.history import History
from gpumem_nb.shared.answers import Progress
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui.answers import ExportView
from gpumem_nb.ui.search_view import SearchView
from gpumem_nb.ui.widgets import Region
from tests.internals import widgets_in
from tests.timing import HANG_S, until


class Session:
    """Tells nothing of its ranks."""

    def __init__(self) -> None:
        self.history = History(1)
        self.workload: object = "net"
        self.settings = Settings()

    def export(self, path: str, ddp: bool) -> str:
        return f"Written: {path} for {self.workload}, batch_size={self.settings.batch_size}\nNot carried over: steps"

    @contextmanager
    def telling(self, progress: Progress) -> Iterator[None]:
        yield


def said_by(view: SearchView) -> str:
    regions = [one for one in widgets_in(view.widget) if isinstance(one, Region)]
    [said] = [one for one in regions if "gpumem-searching" in one._dom_classes]
    return str(said.html)


class Asking:
    """A view with one question, whose turns are given by hand."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.asked = 0
        self.answer: Callable[[Progress], str] = lambda progress: "found"
        questions = [("Look", "search", "looks", self._question)]
        self.session = Session()
        self.view = SearchView(self.session, "Looking", [], questions, self.queue.append, lambda action: None)  # type: ignore[arg-type]

    def _question(self, progress: Progress) -> str:
        self.asked += 1
        said = self.answer(progress)
        self.view.show([ipywidgets.Label(f"answer {self.asked}")])
        return said

    def press(self, words: str) -> None:
        self._button(words).click()

    def turn(self) -> None:
        self.queue.pop(0)()

    def can(self, words: str) -> bool:
        button = self._button(words)
        return not button.disabled and button.layout.display != "none"

    @property
    def said(self) -> str:
        return said_by(self.view)

    @property
    def shown(self) -> list[str]:
        return [one.value for one in widgets_in(self.view.widget) if type(one).__name__ == "Label"]

    def _button(self, words: str) -> Any:
        [button] = [one for one in widgets_in(self.view.widget) if getattr(one, "description", "") == words]
        return button


@pytest.fixture
def asking() -> Asking:
    return Asking()


def test_an_answer_is_shown_with_what_is_said_of_it(asking: Asking) -> None:
    assert asking.can("Look")
    assert not asking.can("Stop")
    asking.press("Look")
    assert "Waiting for the question before it" in asking.said
    assert asking.can("Stop")
    assert not asking.can("Look")
    asking.turn()
    assert (asking.said, asking.shown) == ("<p>found</p>", ["answer 1"])
    assert asking.can("Look")
    assert not asking.can("Stop")


def test_an_answer_goes_when_something_else_is_loaded_and_the_next_press_asks_anew(asking: Asking) -> None:
    asking.view.open()
    asking.turn()
    asking.session.workload = None
    asking.view.follow("the ranks have ended")
    assert asking.shown == ["answer 1"], "what was found stays when the ranks end"
    asking.session.workload = "another"
    asking.view.follow("")
    assert (asking.view.is_open, asking.said, asking.shown) == (False, "", [])
    asking.view.open()
    asking.turn()
    assert asking.shown == ["answer 2"]


def test_a_press_on_export_after_a_flip_writes_the_script_again() -> None:
    session = Session()
    view = ExportView(session, lambda action: action(), lambda action: None, lambda: None)  # type: ignore[arg-type]
    view.open()
    assert "batch_size=32" in said_by(view)
    view.fold()
    session.settings = session.settings.replace(batch_size=8)
    view.open()
    assert "batch_size=8" in said_by(view)


def test_one_that_still_waits_is_stopped_at_once_and_leaves_the_earlier_answer(asking: Asking) -> None:
    asking.press("Look")
    asking.turn()
    asking.press("Look")
    asking.press("Stop")
    assert asking.said == "<p>Stopped.</p>"
    assert asking.can("Look")
    assert not asking.can("Stop")
    asking.turn()
    assert (asking.asked, asking.said, asking.shown) == (1, "<p>Stopped.</p>", ["answer 1"])


def test_one_that_was_stopped_while_it_waited_is_not_asked_with_the_next(asking: Asking) -> None:
    asking.press("Look")
    asking.press("Stop")
    asking.press("Look")
    asking.turn()
    assert asking.asked == 0
    assert "Waiting for the question before it" in asking.said, "that is the next one's"
    assert asking.can("Stop")
    asking.turn()
    assert (asking.asked, asking.said) == (1, "<p>found</p>")


def test_one_that_has_begun_hears_of_it(asking: Asking) -> None:
    begun, pressed = threading.Event(), threading.Event()

    def answer(progress: Progress) -> str:
        begun.set()
        assert pressed.wait(HANG_S)
        assert "Stopping" in asking.said
        progress("more", 0.5)
        return "not reached"

    asking.answer = answer
    asking.press("Look")
    worker = threading.Thread(target=asking.turn)
    worker.start()
    assert begun.wait(HANG_S)
    asking.press("Stop")
    pressed.set()
    worker.join(HANG_S)
    assert asking.said == "<p>Stopped.</p>"
    assert asking.shown == []
    assert asking.can("Look")


def test_a_page_that_is_closed_asks_nothing_more(asking: Asking) -> None:
    asking.press("Look")
    asking.view.close()
    asking.turn()
    assert asking.asked == 0


def test_stop_that_comes_with_the_turn_is_heard_once_and_for_all(asking: Asking) -> None:
    """Whichever comes first, it is stopped or it was never asked, and the buttons are as they were."""

    def answer(progress: Progress) -> str:
        until(lambda: "Stopping" in asking.said)
        progress("more", 0.5)
        return "not reached"

    asking.answer = answer
    for _ in range(50):
        asking.press("Look")
        worker = threading.Thread(target=asking.turn)
        worker.start()
        asking.press("Stop")
        worker.join(HANG_S)
        assert asking.said == "<p>Stopped.</p>"
        assert asking.can("Look")
        assert not asking.can("Stop")


def visible(asking: Asking) -> list[str]:
    """What is seen of the view: nothing, a line, or the answer, too."""
    view = asking.view.widget
    if view.layout.display == "none":
        return []
    return ["line", *(["answer"] if view.children[-1].layout.display != "none" else [])]


def test_it_begins_when_it_is_opened_and_leaves_a_line_when_it_is_closed(asking: Asking) -> None:
    assert visible(asking) == []
    asking.view.open()
    asking.turn()
    assert (asking.asked, asking.said, visible(asking)) == (1, "<p>found</p>", ["line", "answer"])
    asking.view.fold()
    assert visible(asking) == ["line"]
    asking.view.open()
    assert (asking.queue, visible(asking)) == ([], ["line", "answer"]), "the answer that stands there is shown again"


def test_what_is_being_asked_goes_on_while_it_is_closed(asking: Asking) -> None:
    asking.view.open()
    asking.view.fold()
    assert visible(asking) == ["line"]
    assert asking.can("Stop")
    asking.turn()
    assert (asking.said, visible(asking)) == ("<p>found</p>", ["line"])


def test_one_that_cannot_be_asked_yet_is_asked_when_it_is_opened_again(asking: Asking) -> None:
    asking.view.follow("Nothing is loaded.")
    asking.view.open()
    asking.view.fold()
    assert (asking.queue, visible(asking)) == ([], [])
    asking.view.follow("")
    asking.view.open()
    assert len(asking.queue) == 1
