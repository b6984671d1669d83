"""Runs a cell's code so that tracebacks show its lines."""

from __future__ import annotations

import ast
import linecache
from collections import deque
from typing import Any

MOST_SOURCES = 200
"""Of so many cells the lines are kept: functions of older ones show in tracebacks without them."""

_titles: deque[str] = deque()
_ran = 0


def ran() -> int:
    """How many pieces of somebody's code this rank has run."""
    return _ran


def one_more() -> None:
    """Somebody's code is about to run, and may do anything to what is trained."""
    global _ran
    _ran += 1


def execute(source: str, title: str, variables: dict[str, Any]) -> Any:
    """Run code among ``variables``; the value of its last expression, if it ends with one.

    ``title`` stands in tracebacks in place of a file name; two cells of one title show the lines of the later one.
    """
    one_more()
    remember(source, title)
    tree = ast.parse(source, title)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, title, "exec", dont_inherit=True), variables)  # not this module's future features
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), title, "eval", dont_inherit=True), variables)


def remember(source: str, title: str) -> None:
    """Let tracebacks show these lines where this title stands in place of a file name."""
    if title in _titles:
        _titles.remove(title)
    _titles.append(title)
    linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)
    while len(_titles) > MOST_SOURCES:
        linecache.cache.pop(_titles.popleft(), None)
