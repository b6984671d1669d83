"""Code that runs on a rank, and what its tracebacks show."""

from __future__ import annotations

import asyncio
import linecache
import signal
import traceback
from collections.abc import AsyncIterator
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.engine import cells


def traceback_of(name: str, variables: dict[str, Any]) -> str:
    with pytest.raises(ZeroDivisionError) as caught:
        variables[name]()
    return "".join(traceback.format_exception(caught.value))


def test_each_cell_shows_its_own_lines() -> None:
    variables: dict[str, Any] = {}
    cells.execute("def first():\n    return 1 / 0  # of the first", "<%%hvd cell 1>", variables)
    cells.execute("def second():\n    return 2 / 0  # of the second", "<%%hvd cell 2>", variables)
    for name in ("first", "second"):
        shown = traceback_of(name, variables)
        assert f"# of the {name}" in shown
        assert shown.count("# of the") == 1


def test_lines_of_old_cells_are_let_go() -> None:
    titles = [f"<cell of many {number}>" for number in range(2 * cells.MOST_SOURCES)]
    for title in titles:
        cells.execute("x = 1", title, {})
    assert [title for title in titles if title in linecache.cache] == titles[-cells.MOST_SOURCES :]


def test_a_cell_that_runs_again_is_kept_once() -> None:
    for number in range(cells.MOST_SOURCES):
        cells.execute("x = 1", f"<filler {number}>", {})
        cells.execute("x = 1", "<again>", {})
    assert "<filler 1>" in linecache.cache
    assert "<again>" in linecache.cache


def test_the_last_expression_gives_the_value() -> None:
    assert cells.execute("x = 2\nx + 1", "<value>", {}) == 3
    assert cells.execute("x = 2", "<no value>", {}) is None
    assert cells.execute("", "<nothing>", {}) is None


def test_a_cell_has_none_of_our_future_features() -> None:
    variables: dict[str, Any] = {}
    cells.execute("def f(x: int): ...", "<annotated>", variables)
    assert variables["f"].__annotations__ == {"x": int}
    assert cells.execute("def g(x: int): ...\ng.__annotations__", "<shown>", variables) == {"x": int}


def test_a_cell_may_await_and_tasks_live_on_in_the_next() -> None:
    async def as_an_engine() -> list[Any]:  # which answers requests inside of a loop of its own
        variables: dict[str, Any] = {"seen": [], "asyncio": asyncio}
        started = "async def work(): await asyncio.sleep(0); return 3\ntask = asyncio.create_task(work())\n"
        found = [
            cells.execute(started + "await asyncio.sleep(0)", "<code 1>", variables),
            cells.execute("await task", "<code 2>", variables),
            cells.execute("[x async for x in numbers()]", "<code 3>", variables | {"numbers": numbers}),
            cells.execute("1 + 1", "<code 4>", variables),
            cells.execute("task = asyncio.create_task(work())", "<code 5>", variables),
            cells.execute("await task", "<code 6>", variables),
            variables.update(task=cells.called(lambda: asyncio.create_task(asyncio.sleep(0, 4)), ())),
            cells.execute("await task", "<code 7>", variables),
            cells.called(variables["work"], ()),
        ]
        assert asyncio.get_running_loop() is engines
        return found

    engines = asyncio.new_event_loop()
    assert engines.run_until_complete(as_an_engine()) == [None, 3, [1, 2], 2, None, 3, None, 4, 3]
    engines.close()


def test_a_cell_cannot_run_an_event_loop_as_in_a_notebook() -> None:
    with pytest.raises(RuntimeError, match="cannot be called from a running event loop"):
        cells.execute("asyncio.run(None)", "<code>", {"asyncio": asyncio})


async def numbers() -> AsyncIterator[int]:
    for number in (1, 2):
        yield number


def test_a_cell_that_is_interrupted_while_it_awaits_leaves_nothing_to_go_on() -> None:
    variables: dict[str, Any] = {"asyncio": asyncio, "raised": signal.raise_signal, "number": signal.SIGINT}
    waits = "asyncio.get_running_loop().call_soon(raised, number)\nasync def wait():\n    global ended\n    try:\n"
    waits += "        await asyncio.sleep(60)\n    finally: ended = True\nawait wait()"
    with pytest.raises(KeyboardInterrupt):
        cells.execute(waits, "<code 1>", variables)
    assert variables["ended"]
    assert cells.execute("await asyncio.sleep(0, 5)", "<code 2>", variables) == 5


@pytest.mark.parametrize(
    ("source", "quiet"),
    [
        ("1 + 1;", True),
        ("x = 1\nx ; # said nothing", True),
        ("'ä' ;", True),
        ("f(\n 1\n);", True),
        ("(1 + 1);", True),
        ("1; 2", False),
        ("';'", False),
        ("x = 1;", False),
        ("1  # ;", False),
        ("", False),
    ],
)
def test_a_semicolon_behind_the_last_expression_is_seen(source: str, quiet: bool) -> None:
    assert cells.ends_with_semicolon(source) is quiet


def test_what_fails_to_show_itself_is_asked_once_and_fails_no_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Shows:
        asked = 0

        def _ipython_display_(self) -> None:
            Shows.asked += 1
            raise ValueError("cannot show itself")

    class Lazy:
        asked = 0

        def __repr__(self) -> str:
            self.asked += 1
            return f"{self.asked} time"

    class Table:
        def _repr_html_(self) -> str:
            return "<table></table>"

        def __repr__(self) -> str:
            raise ValueError("no text")

    shell = InteractiveShell()
    shell.display_pub = published = CapturingDisplayPublisher()
    monkeypatch.setattr(cells, "shell_here", lambda: shell)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert "Shows object" in str(cells.shown(Shows()))
    assert Shows.asked == 1
    assert cells.shown(Table()) is None
    assert [output["data"] for output in published.outputs] == [{"text/html": "<table></table>"}]
    assert cells.shown({"a": 1}) == "{'a': 1}"
    assert cells.shown(Lazy()) == "1 time"
