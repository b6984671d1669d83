"""One panel shows one session after the other: what serves the one before ends nothing of the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_nb.report.runs import Runs
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.ui.panel import Panel
from tests.ledgers import MIB, info, reading, sample
from tests.timing import HANG_S, until
from tests.unit.test_knob_tip import Session as Predicting


class Session(Predicting):
    """One that does nothing, until a test lets it."""

    waiting_for = ()
    wait_report = None
    doing = "paused at step 0"
    runs = Runs(())
    runs_version = ()

    def __init__(self) -> None:
        super().__init__()
        self.ranks = (info(0), info(1))
        self.steps = 0
        self.refuses = threading.Event()
        self.looked_at = threading.Event()

    def verdict(self) -> None:
        self.looked_at.set()

    def step(self) -> None:
        self.steps += 1

    def play(self) -> None:
        self.looked_at.set()
        self.refuses.wait(HANG_S)
        raise InvalidInput("The ranks are gone.")


@pytest.fixture
def panel() -> Iterator[Any]:
    made: Any = Panel(Session())  # type: ignore[arg-type]
    made.show(made._session)
    yield made
    made.close()
    until(lambda: not threads())


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("gpumem_nb panel")]


def press(panel: Any, words: str) -> None:
    [button] = [one for one in (panel._controls.play, panel._controls.step) if one.description == words]
    assert not button.disabled
    button.click()


def test_a_session_that_is_started_again_while_its_end_is_shown_is_served_on(panel: Any) -> None:
    session = panel._session
    until(lambda: threads()[3:])
    goes_on, reached = threading.Event(), threading.Event()
    refresh, watcher = panel._refresh, panel._watcher

    def refresh_late() -> None:
        refresh()
        if session.ended and threading.current_thread().name == "gpumem_nb panel":
            reached.set()
            goes_on.wait(HANG_S)

    panel._refresh = refresh_late
    session.ended = "the ranks are being started again"
    assert reached.wait(HANG_S)
    session.ended = ""
    shows = threading.Thread(target=panel.show, args=(session,))
    shows.start()
    shows.join(0.5)  # as far as it comes by itself
    goes_on.set()
    shows.join(HANG_S)
    watcher.join(HANG_S)  # it has seen the end
    until(lambda: len(threads()) == 4)
    panel._refresh()
    press(panel, "Step")
    until(lambda: session.steps)


def test_what_an_earlier_session_refuses_late_is_not_said_of_the_next(panel: Any) -> None:
    before = panel._session
    panel._refresh()
    press(panel, "Play")
    assert before.looked_at.wait(HANG_S)
    panel.show(Session())
    before.refuses.set()
    until(lambda: len(threads()) == 4)
    assert panel._refusal == ""
    press(panel, "Play")
    panel._session.refuses.set()
    until(lambda: panel._refusal == "The ranks are gone.")


def test_a_closed_panel_serves_nothing_any_more(panel: Any) -> None:
    panel.close()
    until(lambda: not threads())
    before = panel._session
    panel.show(Session())
    assert panel._session is before
    assert not threads()


def test_what_fills_the_memory_is_told_once_a_step_was_done(panel: Any) -> None:
    """Before that a device's peak is of loading, or of trials that are undone."""
    history = panel._session.history
    history.add([], [reading(), reading(60 * MIB)])
    panel._refresh()
    assert panel._filling.html == ""
    history.begin(1, "mine", panel._session.settings)
    history.add([sample(1), sample(1, 1)], [reading(), reading()])
    panel._refresh()
    assert "Rank 0 peaks at 40.0 MiB" in panel._filling.html
