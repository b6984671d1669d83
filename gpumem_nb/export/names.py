"""Names in code: what is called, what is given one, and which lines are IPython's own."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Magic:
    """A line or cell of IPython's own: its name with one or two ``%``, and what stands behind or below it."""

    name: str
    code: str


def last(function: ast.AST) -> str:
    """Return what a function is called, without where it is from."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def dotted(function: ast.AST, meant: Mapping[str, str]) -> str:
    """Return what a function is called from its module on; ``meant`` says what names were imported for."""
    if isinstance(function, ast.Attribute):
        return f"{dotted(function.value, meant)}.{function.attr}"
    if isinstance(function, ast.Call):
        return f"{dotted(function.func, meant)}()"
    return meant.get(function.id, function.id) if isinstance(function, ast.Name) else ""


def calls(name: str, code: str, meant: Mapping[str, str]) -> bool:
    """Return whether some code calls the function of this name; ``meant`` says what names were imported for."""
    return any(isinstance(node, ast.Call) and dotted(node.func, meant) == name for node in ast.walk(ast.parse(code)))


def given_in(code: str) -> set[str]:
    """Return the names that some code gives to something."""
    names = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def magic_of(node: ast.AST) -> Magic | None:
    """Return the magic that an expression calls, as IPython writes ``%``, ``%%`` and ``!``; ``None`` for others."""
    name = dotted(node.func, {}) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or not name.startswith("get_ipython()."):
        return None
    given = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if name.endswith(("system", "getoutput")):
        return Magic("!", given[0] if given else "?")
    mark = {"run_line_magic": "%", "run_cell_magic": "%%"}.get(last(node.func), "")
    return Magic(mark + given[0], given[-1]) if len(given) == len(mark) + 1 and mark else None
