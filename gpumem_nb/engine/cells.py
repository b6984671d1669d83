"""Runs a cell's code as a notebook does: tracebacks show its lines, and it may await."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from types import CodeType
from typing import Any

from ..internals.ipykernel_internals import outside_of_event_loop

MOST_SOURCES = 200
"""Of so many cells the lines are kept: functions of older ones show in tracebacks without them."""

_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_loop: asyncio.AbstractEventLoop | None = None
_titles: deque[str] = deque()
_ran = 0


def ran() -> int:
    """Return how many pieces of the user's code this rank has run."""
    return _ran


def one_more() -> None:
    """Note that the user's code is about to run, which may change anything that is trained."""
    global _ran
    _ran += 1


def execute(source: str, title: str, variables: dict[str, Any]) -> Any:
    """Run code among ``variables``; the value of its last expression, if it ends with one.

    ``title`` stands in tracebacks in place of a file name; two cells of one title show the lines of the later one.
    """
    one_more()
    remember(source, title)
    tree = ast.parse(source, title)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    codes = [compile(tree, title, "exec", _FLAGS, dont_inherit=True)]  # not with this module's future features
    if isinstance(last, ast.Expr):
        codes.append(compile(ast.Expression(last.value), title, "eval", _FLAGS, dont_inherit=True))
    if any(map(_awaits, codes)):
        return _awaited(_run_all(codes, variables))
    return [eval(code, variables) for code in codes][-1]


async def _run_all(codes: list[CodeType], variables: dict[str, Any]) -> Any:
    found = None
    for code in codes:
        found = eval(code, variables)
        if _awaits(code):
            found = await found
    return found


def _awaits(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_COROUTINE)


def ends_with_semicolon(source: str) -> bool:
    """Return whether a semicolon follows the last expression, which tells a notebook not to show its value."""
    last = ast.parse(source).body[-1:]
    if not last or not isinstance(last[0], ast.Expr):
        return False
    line, column = last[0].end_lineno or 0, last[0].end_col_offset
    return source.encode().splitlines()[line - 1][column:].lstrip().startswith(b";")


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Wait for a coroutine, on an event loop that only cells use: the engine's own is busy with this request."""
    global _loop
    _loop = _loop or asyncio.new_event_loop()
    with outside_of_event_loop():
        task = _loop.create_task(coroutine)
        try:
            return _loop.run_until_complete(task)
        finally:
            if task.cancel():  # interrupted
                with suppress(asyncio.CancelledError):
                    _loop.run_until_complete(task)


def remember(source: str, title: str) -> None:
    """Let tracebacks show these lines where this title stands in place of a file name."""
    if title in _titles:
        _titles.remove(title)
    _titles.append(title)
    linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)
    while len(_titles) > MOST_SOURCES:
        linecache.cache.pop(_titles.popleft(), None)
