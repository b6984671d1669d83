"""What was evaluated when a function or class was defined: whether its code would give the same by now."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping
from typing import Any

_UNKNOWN = ast.Call | ast.Await | ast.NamedExpr | ast.Lambda | ast.comprehension | ast.Yield | ast.YieldFrom


def is_another(node: ast.expr, value: Any, known: Mapping[str, Any]) -> bool:
    """Whether an expression that gave ``value`` gives something else among the names of now; calls are not repeated."""
    if any(isinstance(one, _UNKNOWN) for one in ast.walk(node)):
        return False
    try:
        now = eval(compile(ast.Expression(node), "<an expression>", "eval"), dict(known))
        return not (now is value or (type(now) is type(value) and bool(now == value)))
    except Exception:  # names are gone, or it cannot be compared
        return True


def other_defaults(node: ast.arguments, function: types.FunctionType, known: Mapping[str, Any]) -> Iterator[str]:
    """Names of arguments whose defaults are not what their code gives by now."""
    names = [one.arg for one in (*node.posonlyargs, *node.args)]
    code = dict(zip(reversed(names), reversed(node.defaults), strict=False))
    code |= {one.arg: default for one, default in zip(node.kwonlyargs, node.kw_defaults, strict=True) if default}
    values = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
    values |= function.__kwdefaults__ or {}
    for name in code | values:
        if name not in code or name not in values or is_another(code[name], values[name], known):
            yield name
