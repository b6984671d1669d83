"""Code that runs on a rank, and what its tracebacks show."""

from __future__ import annotations

import linecache
import traceback
from typing import Any

import pytest

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
