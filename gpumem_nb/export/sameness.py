"""Checks that a script's code is the code that ran, and still gives what it gave then."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_KINDS = 0x3EF  # of functions: generators and the like, but neither nested ones nor future features
_LAZY = annotations.compiler_flag
_PLAIN = (
    "co_name",
    "co_code",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_exceptiontable",
)
_UNKNOWN = ast.Call | ast.Await | ast.NamedExpr | ast.Lambda | ast.comprehension | ast.Yield | ast.YieldFrom


def is_definition_of(source: str, function: types.FunctionType, around: str) -> bool:
    """Return whether some code is one definition, and the function's.

    Args:
        source: of the definition.
        around: the code that it was found in. Python compiles calls of what is imported there in another way.
    """
    body = ast.parse(source).body
    return len(body) == 1 and _has(_compiled(body, function, around), function)


def is_lambda(node: ast.Lambda, function: types.FunctionType, around: str) -> bool:
    """Return whether a lambda of some code is the function."""
    return _has(_compiled([ast.copy_location(ast.Expr(node), node)], function, around), function)


def returns_like(source: str, function: types.FunctionType, around: str) -> bool:
    """Return whether a definition that only returns something does what a lambda does."""
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    statement = definition.body[0]
    if len(definition.body) > 1 or not isinstance(statement, ast.Return) or statement.value is None:
        return False
    return is_lambda(ast.copy_location(ast.Lambda(definition.args, statement.value), statement), function, around)


def other_methods(source: str, value: type, file: str, around: str) -> Iterator[str]:
    """Yield names of methods that a class has from this file, and that the definition in ``source`` does not have."""
    body = ast.parse(source).body
    for name, part in vars(value).items():
        for function in _functions_in(part):
            if function.__code__.co_filename == file:
                inner = (inside for code in _compiled(body, function, around) for inside in _codes(code))
                if not _has(inner, function):
                    yield name


def same_annotations(text: str, lazy: bool, here: bool) -> bool:
    """Return whether some code does the same where annotations are evaluated otherwise than it says."""
    one, other = (
        compile(text, "<script>", "exec", _LAZY if wanted else 0, dont_inherit=True) for wanted in (lazy, here)
    )
    return lazy == here or _same(one, other)


def _has(codes: Iterator[types.CodeType], function: types.FunctionType) -> bool:
    return any(_same(code, function.__code__) for code in codes)


def _functions_in(part: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of an attribute: its own, and those in properties, class methods and the like."""
    if isinstance(part, types.FunctionType):
        yield part
        return
    inner = (getattr(part, name, None) for name in ("__func__", "fget", "fset", "fdel", "func"))
    yield from (one for one in inner if isinstance(one, types.FunctionType))


def _compiled(body: Sequence[ast.stmt], function: types.FunctionType, around: str) -> Iterator[types.CodeType]:
    """Yield the code in some statements, by themselves and with the imports around them, as it may have run."""
    imports = [node for node in ast.parse(around).body if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = [node for node in imports if getattr(node, "module", "") != "__future__"]
    for before in ([], imports):
        tree, flags = ast.Module([*before, *body], []), function.__code__.co_flags & _LAZY
        yield from _codes(compile(tree, "<script>", "exec", flags, dont_inherit=True))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _same(one: types.CodeType, other: types.CodeType) -> bool:
    """Return whether two code objects do the same, wherever they stand."""
    alike = all(getattr(one, name, None) == getattr(other, name, None) for name in _PLAIN)
    alike = alike and one.co_flags & _KINDS == other.co_flags & _KINDS and len(one.co_consts) == len(other.co_consts)
    return alike and all(map(_same_constant, one.co_consts, other.co_consts))


def _same_constant(one: Any, other: Any) -> bool:
    if isinstance(one, types.CodeType) and isinstance(other, types.CodeType):
        return _same(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_same_constant, one, other))
    if type(one) is not type(other):
        return False
    return bool(one == other) if isinstance(one, frozenset) else repr(one) == repr(other)  # 0.0 is not -0.0


def is_another(node: ast.expr, value: Any, known: Mapping[str, Any]) -> bool:
    """Return whether an expression that gave ``value`` now gives something else; calls are not repeated."""
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
