"""Methods of cells' classes that Python calls where no call is written, such as properties and operators."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from .names import last

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_WRITTEN_OUT = {"__init__", "__new__", "__call__", "__init_subclass__", "__set_name__", "__class_getitem__"}
_WRITTEN_OUT |= {"__post_init__", "__enter__", "__exit__", "__getstate__", "__setstate__", "__reduce__"}
_WRITTEN_OUT |= {"__setattr__", "__setitem__", "__delattr__", "__delitem__", "__copy__", "__deepcopy__", "__del__"}
"""Methods that a call, a definition, ``with``, an assignment or ``del`` leads to."""
_CHANGING = {"append", "extend", "insert", "remove", "pop", "popleft", "popitem", "clear", "update", "add", "discard"}
_CHANGING |= {"setdefault", "setattr", "delattr", "exec", "eval", "next", "send", "read", "readline", "seek"}
_CHANGING |= {"random", "normal", "uniform", "integers", "randint", "choice", "shuffle", "permutation", "sample"}
_ITEMS = {"__getitem__", "__missing__"}
_ITEMS_READ = ast.Subscript | ast.For | ast.comprehension | ast.Starred | ast.In | ast.NotIn
_ITERATING = {"sum", "min", "max", "list", "tuple", "set", "dict", "sorted", "enumerate", "zip", "any", "all"}


def unseen_changes(cells: Sequence[ast.Module], reading: Collection[str]) -> frozenset[str]:
    """Return the names of methods that may change something though no call of them is written.

    Args:
        cells: the code of all of them.
        reading: names of methods whose calls are taken for reading only.
    """
    nodes = [node for cell in cells for node in ast.walk(cell)]
    unseen = {*reading, "extra_repr", *(name for name, _ in _named_otherwise(nodes))}
    unseen |= {
        one.name for one in _functions(nodes) if _is_unseen(one.name) or any(map(_is_attribute, one.decorator_list))
    }
    filled = {"__missing__"} if any("defaultdict" in _names_of(one) for one in nodes) else set()  # by what reads it
    return frozenset(_changing(nodes) & unseen | filled) | frozenset(filter(_is_unseen, _set_later(nodes)))


def harmless(cells: Sequence[ast.Module]) -> frozenset[str]:
    """Return the names of functions and methods of cells that change nothing that is there after them."""
    nodes = [node for cell in cells for node in ast.walk(cell)]
    return frozenset(one.name for one in _functions(nodes)) - _changing(nodes)


def _functions(nodes: Sequence[ast.AST]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes if isinstance(node, _FUNCTIONS) and node.name != "__init__"]


def _changing(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names of functions and methods that may change something, or use one that does."""
    functions = _functions(nodes)
    code = [(one.name, [inner for part in one.body for inner in ast.walk(part)]) for one in functions]
    code += _named_otherwise(nodes)
    changing = {one.name for one in functions if "cached_property" in map(last, one.decorator_list)}
    while more := {name for name, parts in code if _changes(parts, changing)} - changing:
        changing |= more
    return changing


def may_call(node: ast.AST, methods: Collection[str]) -> bool:
    """Return whether some code may call one of these methods of an object, without a call that is written."""
    parts = [*ast.walk(node)] if methods else []
    called = {last(one.func) for one in parts if isinstance(one, ast.Call)}
    named = {one.attr for one in parts if isinstance(one, ast.Attribute)}
    if any(not _is_unseen(name) and (name in named or "hasattr" in called) for name in methods):
        return True
    unpacks = any(isinstance(one, ast.Tuple | ast.List) and isinstance(one.ctx, ast.Store) for one in parts)
    items = unpacks or called & _ITERATING or any(isinstance(one, _ITEMS_READ) for one in parts)
    return any(_is_unseen(name) and (items or name not in _ITEMS) for name in methods)


def _names_of(node: ast.AST) -> tuple[str, str]:
    """Return what is named here, and what is imported."""
    return last(node), node.name if isinstance(node, ast.alias) else ""


def _is_unseen(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _WRITTEN_OUT


def _is_attribute(function: ast.expr) -> bool:
    """Return whether a decorator, or a function by this name, makes an attribute of a method."""
    return "property" in last(function) or last(function) in ("getter", "setter", "deleter")


def _named_otherwise(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield the name and the code of what is made as ``__rshift__ = function`` or ``part = property(function)``."""
    for node in (one for one in nodes if isinstance(one, ast.Assign)):
        for target in node.targets:
            made = isinstance(node.value, ast.Call) and _is_attribute(node.value.func)
            if made or _is_unseen(last(target)):
                yield last(target), [*ast.walk(node.value)]


def _set_later(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield attributes that are set from outside of a class."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Call) and last(node.func) == "setattr" and len(node.args) > 1:
            yield str(getattr(node.args[1], "value", ""))


def _changes(parts: Sequence[ast.AST], changing: Collection[str]) -> bool:
    """Return whether the parts of a function may change something that is there after it, or use what does."""
    by_call = not {"forward", "__call__"}.isdisjoint(changing)
    return any(_is_change(part, changing) or (by_call and _calls_what_it_holds(part)) for part in parts)


def _is_change(node: ast.AST, changing: Collection[str]) -> bool:
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return True
    if isinstance(node, ast.Attribute | ast.Name) and last(node) in changing:
        return True
    if isinstance(node, ast.Call) and (last(node.func) in _CHANGING or last(node.func).endswith("_")):
        return True
    effect = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    draws = isinstance(node, ast.keyword) and node.arg == "generator"
    return effect or draws or isinstance(node, ast.Global | ast.Nonlocal | ast.AugAssign)


def _calls_what_it_holds(node: ast.AST) -> bool:
    """Return whether it is as ``self.transform(row)``."""
    held = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    return isinstance(held, ast.Name) and held.id == "self"
