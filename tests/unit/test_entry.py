"""The doors of a rank, from the request to the answer, without a rank."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest
from IPython.core.events import EventManager, available_events
from IPython.core.formatters import DisplayFormatter

from gpumem_nb.cluster.calls import Call
from gpumem_nb.engine import cells, entry, surroundings
from gpumem_nb.engine.cells import attached_names
from gpumem_nb.engine.link import signals
from gpumem_nb.engine.surroundings import Surrounded
from gpumem_nb.shared.errors import RankError, WorkloadError

EVENTS = EventManager(cast(Any, None), available_events)
DISPLAYED: list[dict[str, str]] = []


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What cells see, in place of an engine's."""
    shell = SimpleNamespace(parent_header={}, events=EVENTS, display_formatter=DisplayFormatter())
    shell.display_pub = SimpleNamespace(publish=lambda data, metadata: DISPLAYED.append(data))
    DISPLAYED.clear()
    for module_with_it in (entry, cells):
        monkeypatch.setattr(module_with_it, "shell_here", lambda: shell)
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "__main__", module)
    return vars(module)


def read(answer: bytes) -> Any:
    """The answer as the notebook has it."""
    future: Future[bytes] = Future()
    future.set_result(answer)
    (value,) = Call([0], [future], pulse="pulse").get()
    return value


def test_a_cell_gives_its_value_or_its_representation() -> None:
    assert read(entry.run_cell("x = 2\n[x]", "<code 1>", "value", memory=False)) == [2]
    assert read(entry.run_cell("[x]", "<code 2>", "text", memory=False)) == "[2]"
    assert read(entry.run_cell("x = 3", "<code 3>", "text", memory=False)) is None
    assert read(entry.run_cell("x;  # quietly", "<code 4>", "text", memory=False)) is None
    assert read(entry.run_cell("x;", "<code 5>", "value", memory=False)) == 3


def test_what_has_another_form_than_text_is_displayed() -> None:
    table = (
        "class Table:\n    def __repr__(self): return 'a table'\n    def _repr_html_(self): return '<table>'\nTable()"
    )
    assert read(entry.run_cell(table, "<code 1>", "text", memory=False)) is None
    assert DISPLAYED == [{"text/plain": "a table", "text/html": "<table>"}]
    itself = "class Shows:\n    def _ipython_display_(self): shown.append(1)\nshown = []\nShows()"
    assert read(entry.run_cell(itself, "<code 2>", "text", memory=False)) is None
    assert read(entry.run_cell("shown", "<code 3>", "text", memory=False)) == "[1]"
    assert len(DISPLAYED) == 1


def test_what_a_cell_shows_can_be_interrupted_while_it_is_computed() -> None:
    slow = "class Slow:\n    def __repr__(self):\n        press()\n        return 'not interrupted'\nSlow()"
    vars(sys.modules["__main__"])["press"] = lambda: signal.raise_signal(signal.SIGINT)
    before = signal.signal(signal.SIGINT, signals._on_signal)
    try:
        with pytest.raises(RankError, match="KeyboardInterrupt"):
            read(entry.run_cell(slow, "<code>", "text", memory=False))
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", ["SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("end", ["", "; 1 / 0"])
def test_a_signal_that_a_cell_handles_in_its_own_way_is_a_ranks_again_after_it(number: str, end: str) -> None:
    cell = f"import signal; signal.signal(signal.{number}, signal.SIG_IGN); heard = signal.getsignal(signal.{number})"
    before = signal.getsignal(signal.Signals[number])
    entry.run_cell(cell + end, "<code>", "value", memory=False)
    assert vars(sys.modules["__main__"])["heard"] is signal.SIG_IGN
    assert signal.getsignal(signal.Signals[number]) is before


def test_what_ipython_does_after_a_cell_is_done_also_after_one_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def show() -> None:
        print("figures")

    EVENTS.register("post_execute", show)
    try:
        for source in ("1", "1 / 0"):
            entry.run_cell(source, "<code>", "value", memory=False)
            assert capsys.readouterr().out == "figures\n"
    finally:
        EVENTS.unregister("post_execute", show)


def test_a_cell_that_awaits_shows_its_own_lines_when_it_fails() -> None:
    source = "import asyncio\nasync def fail():\n    await asyncio.sleep(0)\n    1 / 0\nawait fail()"
    with pytest.raises(RankError) as caught:
        read(entry.run_cell(source, "<code 6>", "value", memory=False))
    assert caught.value.remote_traceback.splitlines()[1] == '  File "<code 6>", line 5, in <module>'


def test_a_cell_that_binds_another_object_to_an_attached_name_is_told_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    attached_names.attached({"loss": "loss"}, {"loss": print})
    said = "loss is another object than the one attached; attach again to train with it: training still uses the old."
    notes = [
        cloudpickle.loads(entry.run_cell(source, "<code>", "value", memory=False)).notes
        for source in ("loss = len", "1", "loss = abs\n1 / 0")
    ]
    assert notes == [(said,), (), (said,)]
    assert capsys.readouterr().out == f"{said}\n" * 2
    attached_names.attached({}, {})


def test_an_exit_is_told_as_what_it_does() -> None:
    with pytest.raises(RankError, match=r"SystemExit: sys.exit\(3\) ends this cell, not the rank. Type %hvd_stop"):
        read(entry.run_cell("import sys; sys.exit(3)", "<code>", "value", memory=False))


def test_what_changed_around_a_cell_is_printed_before_it_and_travels_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Surrounded()
    monkeypatch.setattr(surroundings, "here", here)
    here.notes.append("changed")
    assert cloudpickle.loads(entry.call("follow_nothing", cloudpickle.dumps(()))).notes == ()
    first, second = (cloudpickle.loads(entry.run_cell(f"print({x})", "<code>", "value", memory=False)) for x in (1, 2))
    assert (first.notes, second.notes) == (("changed",), ())
    assert capsys.readouterr().out == "changed\n1\n2\n"


def test_a_function_gives_its_value() -> None:
    assert read(entry.call_function(cloudpickle.dumps((lambda a, b: a + b, (1, 2))))) == 3


def test_a_traceback_begins_with_somebodys_own_line() -> None:
    with pytest.raises(RankError, match="ZeroDivisionError") as caught:
        read(entry.run_cell("def f():\n    1 / 0\nf()", "<code 4>", "value", memory=False))
    # What the runner of the tests handles at this moment may stand before it, as its context.
    lines = caught.value.remote_traceback.rpartition("Traceback (most recent call last):")[2].splitlines()
    assert lines[1] == '  File "<code 4>", line 3, in <module>'
    assert "    1 / 0" in lines
    assert "engine" not in caught.value.remote_traceback


def test_a_value_that_cannot_be_pickled_is_an_error_of_the_rank() -> None:
    with pytest.raises(RankError, match="TypeError: cannot pickle"):
        read(entry.run_cell("import threading; threading.Lock()", "<code 5>", "value", memory=False))


@pytest.mark.parametrize("raised", ["SystemExit(3)", "KeyboardInterrupt()", "GeneratorExit()"])
def test_nothing_that_a_cell_raises_gets_past_the_door(raised: str) -> None:
    with pytest.raises(RankError, match=raised.partition("(")[0]):
        read(entry.run_cell(f"raise {raised}", "<code 6>", "value", memory=False))


def test_an_error_of_the_toolkit_comes_back_as_what_it_is() -> None:
    code = "from gpumem_nb.shared.errors import WorkloadError\nraise WorkloadError('no such thing')"
    with pytest.raises(WorkloadError, match="no such thing"):
        read(entry.run_cell(code, "<code 7>", "value", memory=False))


def test_an_error_of_the_toolkit_that_cannot_be_pickled_comes_back_as_text() -> None:
    code = (
        "import threading\nfrom gpumem_nb.shared.errors import WorkloadError\n"
        "error = WorkloadError('no such thing')\nerror.lock = threading.Lock()\nraise error"
    )
    with pytest.raises(RankError, match="WorkloadError: no such thing"):
        read(entry.run_cell(code, "<code 8>", "value", memory=False))


def test_an_exception_without_words_gets_past_the_door_under_its_name() -> None:
    code = "class Mute(Exception):\n    def __str__(self):\n        return 1 / 0\nraise Mute"
    with pytest.raises(RankError, match="Mute: Mute"):
        read(entry.run_cell(code, "<code 9>", "value", memory=False))
