"""The source of a class that a notebook's cell defines: Python knows no file of it, but that of its functions."""

from __future__ import annotations

import ast
import enum
import linecache
import types
from collections.abc import Iterator
from itertools import chain

from .sameness import is_another, other_defaults, other_methods

_NONE = object()
# Of abstract classes, of named tuples and of enumerations.
_BY_ITSELF = {"_abc_impl", "_fields", "_field_defaults", "_make", "_replace", "_asdict"}
_BY_ITSELF |= {name for name in vars(enum.Enum("_Any", "one")) if name.startswith("_") and not name.startswith("__")}
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


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
                begin = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                text, file = "\n".join(source.split("\n")[begin - 1 : node.end_lineno]), function.__code__.co_filename
                if changed := next(chain(_changed(value, node, file), other_methods(text, value, file, source)), ""):
                    raise ValueError(changed)
                return text
    raise OSError(value.__name__)


def functions_of(value: type) -> list[types.FunctionType]:
    """Those that its definition has, as far as they were not replaced."""
    return [one for one in vars(value).values() if isinstance(one, types.FunctionType)]


def globals_of(value: type) -> dict[str, object]:
    """Return where its functions find what they use; a decorator's function is of another module."""
    functions = functions_of(value)
    own = (one for one in functions if one.__globals__.get("__name__") == value.__module__)
    return next(own, functions[0]).__globals__


def _changed(value: type, node: ast.ClassDef, file: str) -> Iterator[str]:
    """Names of what is not as in the source."""
    known = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    known |= {one.name for one in ast.walk(node) if isinstance(one, _FUNCTION | ast.ClassDef)}
    known |= {
        alias.asname or alias.name
        for one in ast.walk(node)
        for alias in getattr(one, "names", [])
        if hasattr(alias, "asname")
    }
    known = {_mangled(name, node) for name in known} | _BY_ITSELF
    yield from (name for name in vars(value) if not (name in known or name.startswith("__")))
    names = {**globals_of(value), **vars(value)}
    bases = vars(value).get("__orig_bases__", value.__bases__)
    for base, then in zip(node.bases, bases, strict=False):
        if is_another(base, then, globals_of(value)):
            yield f"base {ast.unparse(base)}"
    last = {_mangled(one.name, node): one for one in node.body if isinstance(one, _FUNCTION)}
    for name, part in last.items():
        now = vars(value).get(name, _NONE)
        if not part.decorator_list and not node.decorator_list:
            if isinstance(now, types.FunctionType) and now.__code__.co_filename == file and _is_in(now, part):
                yield from (f"default of {argument}" for argument in other_defaults(part.args, now, names))
            elif not isinstance(now, classmethod | staticmethod):  # as some are by themselves
                yield name
    for one in node.body:
        targets = one.targets if isinstance(one, ast.Assign) else [one.target] if isinstance(one, ast.AnnAssign) else []
        for target in targets:
            name = _mangled(target.id, node) if isinstance(target, ast.Name) else ""
            code, now = getattr(one, "value", None), _as_written(vars(value).get(name, _NONE), value, name)
            slot = isinstance(now, types.MemberDescriptorType)
            if name and code and name not in last and not slot and is_another(code, now, names):
                yield name


def _as_written(now: object, value: type, name: str) -> object:
    """Return what an attribute was given: enumerations and named tuples make something of it."""
    if isinstance(now, enum.Enum):
        return now.value
    return getattr(value, "_field_defaults", {}).get(name, now)


def _mangled(name: str, node: ast.ClassDef) -> str:
    """Return what a private name is called in the class."""
    private = name.startswith("__") and not name.endswith("__") and node.name.strip("_")
    return f"_{node.name.lstrip('_')}{name}" if private else name


def _is_in(function: types.FunctionType, node: ast.ClassDef | _FUNCTION) -> bool:
    return node.lineno <= function.__code__.co_firstlineno <= (node.end_lineno or 0)
