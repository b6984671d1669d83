"""Cells: running their code as a notebook does, and the variables by which they find what is trained."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, MutableMapping, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any

from ..internals.ipykernel_internals import shell_here, with_running_loop

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
    loop = _loop_of_cells()
    if any(map(_awaits, codes)):
        return _awaited(_run_all(codes, variables), loop)
    with with_running_loop(loop):  # which gets the tasks that the code creates, for a later cell to await
        return [eval(code, variables) for code in codes][-1]


def called(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a function of the user's as a cell does; one that is ``async`` is awaited."""
    one_more()
    loop = _loop_of_cells()
    with with_running_loop(loop):
        found = function(*args)
    return _awaited(found, loop) if inspect.iscoroutine(found) else found


def _loop_of_cells() -> asyncio.AbstractEventLoop:
    """Return the event loop that only cells use: the engine's own is busy with this request."""
    global _loop
    _loop = _loop or asyncio.new_event_loop()
    return _loop


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


def shown(value: Any) -> str | None:
    """Show what a last expression gives as a notebook does: an image or a table is displayed, and text is returned."""
    shell = shell_here()
    formats, shows_itself = shell.display_formatter, shell.display_formatter.ipython_display_formatter
    if shows_itself(value):
        return None
    shows_itself.enabled = False  # it was asked, and may have failed
    try:
        rich, about = formats.format(value, exclude={"text/plain"})
    finally:
        shows_itself.enabled = True
    if rich.keys() <= {"text/plain"}:
        return repr(value)
    with suppress(Exception):  # an image or a table can do without
        rich = {"text/plain": repr(value), **rich}
    shell.display_pub.publish(rich, about)
    return None


def _awaited(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Any:
    with with_running_loop(None):
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        finally:
            if task.cancel():  # interrupted
                with suppress(asyncio.CancelledError):
                    loop.run_until_complete(task)


def remember(source: str, title: str) -> None:
    """Let tracebacks show these lines where this title stands in place of a file name."""
    if title in _titles:
        _titles.remove(title)
    _titles.append(title)
    linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)
    while len(_titles) > MOST_SOURCES:
        linecache.cache.pop(_titles.popleft(), None)


# Whether a variable still stands for what was attached by it: a cell may use the name for something else.
_PASSES_FOR: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: hasattr(value, "named_parameters"),
    "optimizer": lambda value: hasattr(value, "step"),
    "scheduler": lambda value: hasattr(value, "step"),
    "loss": callable,
    "metric": callable,
}


class OfferedNames:
    """The toolkit's objects by their names of ``variables``. A name that holds anything else is not its own."""

    def __init__(self, variables: MutableMapping[str, Any]) -> None:
        self._variables = variables
        self._put: dict[str, weakref.ref[Any]] = {}  # weak: a name that was taken over keeps nothing alive

    def offer(self, objects: Mapping[str, Any]) -> list[str]:
        """Put each under its name if that is free or still holds what was put there.

        Returns:
            The names that hold something else.
        """
        for name, value in objects.items():
            if name not in self._variables or self._is_ours(name):
                self._variables[name], self._put[name] = value, weakref.ref(value)
        return [name for name, value in objects.items() if self._variables[name] is not value]

    def taken_over(self) -> list[str]:
        """Return the names that code has bound to another object of that kind since; each is returned once."""
        taken_over = [name for name in self._put if name in self._variables and not self._is_ours(name)]
        for name in taken_over:
            del self._put[name]
        return [name for name in taken_over if _passes(name, self._variables[name])]

    def withdraw(self) -> None:
        """Take away again what is still where it was put."""
        for name in self._put:
            if self._is_ours(name):
                del self._variables[name]
        self._put.clear()

    def _is_ours(self, name: str) -> bool:
        put = self._put[name]() if name in self._put else None
        return put is not None and self._variables.get(name) is put


class AttachedNames:
    """The variables of cells that were attached, and what they held then."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, Any]] = {}  # by role: the name and its object
        self._said: dict[str, int] = {}  # by role: the id of the object of which it was said that it is another one

    def attached(self, names: Mapping[str, str | None], variables: Mapping[str, Any]) -> None:
        """Note the variables that are trained from now on, by their roles; none if something else was loaded."""
        self._held = {role: (name, variables[name]) for role, name in names.items() if name is not None}
        self._said.clear()

    def replaced(self, variables: Mapping[str, Any]) -> str:
        """Say once that variables hold other objects than those attached; empty when there is nothing new to say."""
        other = self._others(variables)
        news = {role for role, value in other.items() if self._said.get(role) != id(value)}
        self._said = {role: id(value) for role, value in other.items()}
        return self.others(variables) if news else ""

    def others(self, variables: Mapping[str, Any]) -> str:
        """Say which variables hold other objects than those attached; empty if none does."""
        other = self._others(variables)
        return other_objects([self._held[role][0] for role in other]) if other else ""

    def _others(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return what variables hold in place of what was attached by them, by its role."""
        other = dict[str, Any]()
        for role, (name, held) in self._held.items():
            value = variables.get(name)
            if value is not None and value is not held and _passes(role, value):
                other[role] = value
        return other


def _passes(role: str, value: Any) -> bool:
    with suppress(Exception):  # an object may raise whatever it is asked
        return role not in _PASSES_FOR or _PASSES_FOR[role](value)
    return False


attached_names = AttachedNames()
"""Those of this rank."""


def other_objects(names: Sequence[str]) -> str:
    """Say that variables of these names are not what is trained."""
    *first, last = dict.fromkeys(names)
    listed = f"{', '.join(first)} and {last}" if first else last
    what = "are other objects than those attached" if first else "is another object than the one attached"
    return f"{listed} {what}; attach again to train with {'these' if first else 'it'}: training still uses the old."


def taken(names: Sequence[str]) -> str:
    """Return what is said of names that people hold themselves."""
    listed = ", ".join(names)
    return (
        f"Variables of your own on the ranks, which training does not use: {listed}. After `del {listed}` in a %%hvd "
        "cell the next cell finds there what is trained."
    )
