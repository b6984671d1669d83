"""The progress bar in a terminal, in a log, and around a step that somebody asks how far it is."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from gpumem_nb.install import long_step
from gpumem_nb.report.progress_bar import left_in_words, left_s, shown, text_bar
from gpumem_nb.shared.answers import Progress
from gpumem_nb.shared.errors import Interrupted
from gpumem_nb.ui import cells
from tests.timing import HANG_S, until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_for_each_new_thing_and_one_at_the_end() -> None:
    log = io.StringIO()
    with shown(text_bar("Starting ranks", log)) as progress:
        for up in range(3):
            progress("starting the controller", 0.1)
            progress(f"{up} of 2 ranks are up", 0.5 + 0.25 * up)
            progress("", 0.9)
    lines = log.getvalue().splitlines()
    assert [line.partition("%")[0] for line in lines[:3]] == [
        "Starting ranks:   0",
        "Starting ranks: starting the controller:  10",
        "Starting ranks: 0 of 2 ranks are up:  50",
    ]
    assert lines[-1].startswith("Starting ranks: done in ")
    assert len(lines) == 1 + 2 * 3 + 1
    assert not set(log.getvalue()) & set("\r\x1b")


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    terminal = Terminal()
    with shown(text_bar("Starting ranks", terminal)) as progress:
        progress("starting the controller", 0.1)
        progress("starting the controller", 0.2)
    assert " 20%" in terminal.getvalue()
    *_, last = terminal.getvalue().split("\r")
    assert last.startswith("Starting ranks: done in ")
    assert terminal.getvalue().count("\n") == 1


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_work_that_ends_at_once_leaves_nothing(stream: type[io.StringIO]) -> None:
    quick = stream()
    with shown(text_bar("Predicting", quick, patience_s=HANG_S)) as progress:
        progress("a step", 0.5)
    with pytest.raises(RuntimeError), shown(text_bar("Predicting", quick, patience_s=HANG_S)):
        raise RuntimeError
    assert quick.getvalue() == ""


def test_work_that_outlasts_the_patience_shows_what_is_waited_for_then() -> None:
    log, took_s = io.StringIO(), 0.05
    bar = text_bar("Predicting", log, patience_s=took_s)
    with shown(bar) as progress:
        progress("a step", 0.1)
        until(lambda: bar.elapsed_s > took_s)
        progress("a step", 0.5)
    assert [line.partition("|")[0] for line in log.getvalue().splitlines()][:-1] == ["Predicting: a step:  50%"]
    assert log.getvalue().splitlines()[-1].startswith("Predicting: done in ")


@pytest.mark.parametrize(("why", "ended"), [(RuntimeError, "failed"), (Interrupted, "interrupted")])
def test_a_failure_says_what_was_waited_for(why: type[BaseException], ended: str) -> None:
    log = io.StringIO()
    bar = text_bar("Starting ranks", log)
    bar("starting the controller", 0.1)
    with pytest.raises(why), shown(bar):
        raise why
    last = log.getvalue().splitlines()[-1]
    assert last.startswith(f"Starting ranks: {ended} after ")
    assert last.endswith(" (starting the controller)")


def test_what_is_left_comes_from_the_usual_duration_until_the_pace_is_known() -> None:
    assert left_s(None, 60, None) is None
    assert left_s(0.05, 60, 150) == 90
    assert left_s(None, 200, 150) == 0
    assert left_s(0.25, 60, 150) == 180
    assert [left_in_words(seconds) for seconds in (None, 0, 3.4, 12, 125)] == [
        *("", "nearly done", "about 3.4 s left", "about 12 s left", "about 02:05 left")
    ]


def test_a_long_step_keeps_a_log_up_to_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_step, "LOG_INTERVAL_S", 0.01)
    asked = [threading.Event() for _ in range(3)]

    def fraction() -> float:
        now = next((event for event in asked if not event.is_set()), asked[-1])
        now.set()
        return 0.25

    with long_step.long_step("Building Horovod", fraction, estimate_s=100):
        assert asked[-1].wait(HANG_S)
    first, *between, last = capsys.readouterr().out.splitlines()
    assert first.startswith("Building Horovod:   0%")
    assert between[0].startswith("Building Horovod:  25%")
    assert between[0].endswith("s left")
    assert len(between) >= 2
    assert last.startswith("Building Horovod: done in ")


def test_a_step_that_cannot_tell_shows_its_time_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with long_step.long_step("Installing Horovod"):
        pass
    assert capsys.readouterr().out.startswith("Installing Horovod: 00:00\n")


class _Asked:
    """A session with one question, which takes ``progress`` last."""

    told: ClassVar[list[object]] = []

    @cells.shows_progress("What if")
    def what_if(self, steps: int = 1, progress: Progress = lambda what, done: None) -> int:
        """Note who is told."""
        self.told.append(progress)
        return steps


def test_a_question_in_a_cell_shows_how_far_it_is_unless_somebody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[str, float]] = []

    @contextmanager
    def bar(title: str, measured: bool = True, patience_s: float = 0.0) -> Iterator[str]:
        bars.append((title, patience_s))
        yield "the bar"

    monkeypatch.setattr(cells, "progress_bar", bar)
    told: list[object] = []
    monkeypatch.setattr(_Asked, "told", told)
    asked = _Asked()
    asked.what_if(2)
    assert not bars, "a script or a terminal says nothing"
    monkeypatch.setattr(cells, "in_notebook", lambda: True)
    assert asked.what_if(2) == 2
    assert (bars, told[1:]) == ([("What if", 1.0)], ["the bar"])

    def mine(what: str, done: float) -> None:
        raise AssertionError

    asked.what_if(2, mine)
    asked.what_if(progress=mine)
    thread = threading.Thread(target=asked.what_if)
    thread.start()
    thread.join()
    assert told[2:4] == [mine, mine]
    assert len(bars) == 1, "nor does what a panel's thread asks"
    twice: dict[str, Any] = {"steps": 2}
    with pytest.raises(TypeError, match="steps"):
        asked.what_if(1, **twice)
