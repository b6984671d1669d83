"""Checks that a script's code is the code that ran, and still gives what it gave then; the source of a cell's class."""

from __future__ import annotations

import ast
import enum
import linecache
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
_UNKNOWN = ast.Call | ast.Await | ast.NamedExpr | ast.Lambda | ast.GeneratorExp | ast.Yield | ast.YieldFrom


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
    except Exception:  # names are gone
        return True
    return not _is_alike(now, value)


def _is_alike(now: Any, value: Any) -> bool:
    try:
        return now is value or (type(now) is type(value) and bool(now == value))
    except Exception:  # it cannot be compared
        return False


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


def attributes_of(function: types.FunctionType) -> list[str]:
    """Return the names of what was set of a function after it was defined."""
    return [name for name in vars(function) if not (name.startswith("__") and name.endswith("__"))]


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
                if changed := next(
                    chain(_changed(value, node, file, globals_of(value)), other_methods(text, value, file, source)), ""
                ):
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


def _changed(value: type, node: ast.ClassDef, file: str, around: Mapping[str, Any]) -> Iterator[str]:
    """Names of what is not as in the source, where ``around`` are the variables."""
    for one in node.body:
        inner = vars(value).get(_mangled(one.name, node)) if isinstance(one, ast.ClassDef) else None
        if isinstance(one, ast.ClassDef) and isinstance(inner, type):
            yield from (f"{one.name}.{changed}" for changed in _changed(inner, one, file, around))
    known = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    known |= {one.name for one in ast.walk(node) if isinstance(one, _FUNCTION | ast.ClassDef)}
    known |= {
        alias.asname or alias.name
        for one in ast.walk(node)
        for alias in getattr(one, "names", [])
        if hasattr(alias, "asname")
    }
    known = {_mangled(name, node) for name in known} | _BY_ITSELF
    for function in functions_of(value):
        own = attributes_of(function) if function.__code__.co_filename == file else []
        yield from (f"attribute {name} of {function.__name__}" for name in own)
    slots = {name for name, part in vars(value).items() if isinstance(part, types.MemberDescriptorType)}
    yield from (name for name in vars(value) if not (name in known | slots or name.startswith("__")))
    names = {**around, **vars(value)}
    bases = vars(value).get("__orig_bases__", value.__bases__)
    for base, then in zip(node.bases, bases, strict=False):
        if is_another(base, then, around):
            yield f"base {ast.unparse(base)}"
    methods = dict(_lambdas(node)) | {_mangled(one.name, node): one for one in node.body if isinstance(one, _FUNCTION)}
    yield from _changed_methods(value, node, file, methods, names)
    for name, then in _attributes(node, value, names).items():
        now = _as_written(_now(value, node, name), value, name)
        alike = isinstance(now, then.kind) if isinstance(then, _Made) else _is_alike(then, now)
        if _mangled(name, node) not in methods and not isinstance(now, types.MemberDescriptorType) and not alike:
            yield _mangled(name, node)


_Method = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _changed_methods(
    value: type, node: ast.ClassDef, file: str, methods: Mapping[str, _Method], known: Mapping[str, Any]
) -> Iterator[str]:
    """Names of methods that are not those of the source, and of their defaults."""
    for name, part in methods.items():
        now = vars(value).get(name, _NONE)
        decorators = getattr(part, "decorator_list", [])
        if not decorators and not node.decorator_list:
            if isinstance(now, types.FunctionType) and now.__code__.co_filename == file and _is_in(now, part):
                yield from (f"default of {argument}" for argument in other_defaults(part.args, now, known))
            elif not isinstance(now, classmethod | staticmethod):  # as some are by themselves
                yield name
        elif {ast.unparse(one) for one in decorators} <= {"property", "classmethod", "staticmethod"}:
            begin = min([part.lineno, *(one.lineno for one in decorators)])
            lines = [one.__code__.co_firstlineno for one in _functions_in(now) if one.__code__.co_filename == file]
            if not any(begin <= line <= (part.end_lineno or 0) for line in lines):
                yield name


def _lambdas(node: ast.ClassDef) -> Iterator[tuple[str, ast.Lambda]]:
    for one in node.body:
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Lambda):
            yield from ((_mangled(name.id, node), one.value) for name in one.targets if isinstance(name, ast.Name))


@dataclass(frozen=True, slots=True)
class _Made:
    """What a call of a class gives: one of its kind."""

    kind: type


def _attributes(node: ast.ClassDef, value: type, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the statements of a class give its attributes by now; calls are not repeated."""
    found, inside = dict[str, Any](), dict[str, Any]()
    for one in node.body:
        if isinstance(one, _FUNCTION | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Expr | ast.Pass):
            continue
        code = ast.Assign([one.target], one.value) if isinstance(one, ast.AnnAssign) and one.value else one
        if isinstance(code, ast.AnnAssign):
            continue
        parts = [*ast.walk(code)]
        stored = {part.id for part in parts if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
        found |= dict.fromkeys(stored, _NONE)
        try:
            if any(isinstance(part, _UNKNOWN | ast.AugAssign) for part in parts):
                inside |= {name: _as_written(_now(value, node, name), value, name) for name in stored}
                found = {name: then for name, then in found.items() if name not in stored} | _kinds(code, value, known)
            else:
                exec(
                    compile(ast.Module([ast.fix_missing_locations(code)], []), "<a class>", "exec"), dict(known), inside
                )
                found |= {name: inside.get(name, _NONE) for name in stored}
        except Exception:  # names are gone
            continue
    return found


def _kinds(node: ast.stmt, value: type, known: Mapping[str, Any]) -> dict[str, _Made]:
    """Return the kind of an attribute that is made by calling a class."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or issubclass(value, enum.Enum):
        return {}
    if any(isinstance(part, _UNKNOWN) for part in ast.walk(node.value.func)):
        return {}
    kind = eval(compile(ast.Expression(node.value.func), "<a class>", "eval"), dict(known))
    names = [one.id for one in node.targets if isinstance(one, ast.Name)]
    return dict.fromkeys(names, _Made(kind)) if isinstance(kind, type) else {}


def _as_written(now: object, value: type, name: str) -> object:
    """Return what an attribute was given: enumerations and named tuples make something of it."""
    if isinstance(now, enum.Enum):
        return now.value
    return getattr(value, "_field_defaults", {}).get(name, now)


def _now(value: type, node: ast.ClassDef, name: str) -> object:
    return vars(value).get(_mangled(name, node), _NONE)


def _mangled(name: str, node: ast.ClassDef) -> str:
    """Return what a private name is called in the class."""
    private = name.startswith("__") and not name.endswith("__") and node.name.strip("_")
    return f"_{node.name.lstrip('_')}{name}" if private else name


def _is_in(function: types.FunctionType, node: ast.ClassDef | _FUNCTION | ast.Lambda) -> bool:
    return node.lineno <= function.__code__.co_firstlineno <= (node.end_lineno or 0)
