"""The source of a class that a notebook's cell defines: Python knows no file of it, but that of its functions."""

from __future__ import annotations

import ast
import linecache
import types
from collections.abc import Iterator

_NONE = object()
_BY_ITSELF = {"_abc_impl"}


def class_source(value: type) -> str:
    """Its definition.

    Raises:
        OSError: it is not known.
        ValueError: the class is not as it was defined: what was changed, by its name.
    """
    for function in functions_of(value):
        source = "".join(linecache.getlines(function.__code__.co_filename))
        try:
            nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        except SyntaxError:
            continue
        for node in nodes:
            if node.name == value.__name__ and _is_in(function, node):
                if changed := next(_changed(value, node, function.__code__.co_filename), ""):
                    raise ValueError(changed)
                begin = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                return "\n".join(source.split("\n")[begin - 1 : node.end_lineno])
    raise OSError(value.__name__)


def functions_of(value: type) -> list[types.FunctionType]:
    """Those that its definition has, as far as they were not replaced."""
    return [one for one in vars(value).values() if isinstance(one, types.FunctionType)]


def _changed(value: type, node: ast.ClassDef, file: str) -> Iterator[str]:
    """Names of what is not as in the source."""
    known = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    known |= {one.name for one in ast.walk(node) if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    known |= {
        alias.asname or alias.name
        for one in ast.walk(node)
        for alias in getattr(one, "names", [])
        if hasattr(alias, "asname")
    }
    yield from (name for name in vars(value) if not (name in known | _BY_ITSELF or name.startswith("__")))
    last = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    for name, part in last.items():
        now = vars(value).get(name, _NONE)
        if not part.decorator_list and not node.decorator_list:
            same = isinstance(now, types.FunctionType) and now.__code__.co_filename == file and _is_in(now, part)
            if not same and not isinstance(now, classmethod | staticmethod):  # as some are by themselves
                yield name
    for one in node.body:
        if isinstance(one, ast.Assign) and len(one.targets) == 1 and isinstance(one.targets[0], ast.Name):
            name = one.targets[0].id
            try:
                then, now = ast.literal_eval(one.value), vars(value).get(name, _NONE)
            except ValueError:  # it is no plain value
                continue
            if name not in last and (type(then) is not type(now) or then != now):
                yield name


def _is_in(function: types.FunctionType, node: ast.ClassDef | ast.FunctionDef) -> bool:
    return node.lineno <= function.__code__.co_firstlineno <= (node.end_lineno or 0)
