"""The code of functions: of a notebook's own its source, with what it uses; of a module's an import."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from ..shared.errors import WorkloadError
from .sameness import (
    attributes_of,
    class_source,
    functions_of,
    globals_of,
    is_definition_of,
    is_lambda,
    other_defaults,
    returns_like,
)
from .statements import statement

_OURS = "gpumem_nb"
_PLAIN = (bool, int, float, str, bytes, type(None))
_LONGEST_VALUE = 200
_BRING_THEIRS = {"torch", "numpy"}  # packages whose modules are there once they are imported
_LAZY = annotations.compiler_flag


class Collector:
    """Gathers the code that some functions need, each part once and before what uses it.

    Attributes:
        imports: lines.
        definitions: everything else, in order.
        names: what stands for which object.
        defined: those names that it defines itself, and does not import.
        lazy_annotations: whether annotations of what it defines are not evaluated.
    """

    def __init__(self) -> None:
        self.imports: list[str] = []
        self.definitions: list[str] = []
        self.names: dict[str, Any] = {}
        self.defined: list[str] = []
        self.lazy_annotations = False
        self._containers: list[Any] = []  # that were written down: kept, for their numbers

    def add(self, role: str, function: Any) -> str:
        """Gather the code of a function; returns an expression for it.

        Raises:
            WorkloadError: its source is not known, or it uses something that cannot be written down.
        """
        if isinstance(function, partial):
            arguments = [*map(self._plain(role), function.args)]
            arguments += [f"{name}={self._plain(role)(value)}" for name, value in function.keywords.items()]
            self._import("from functools import partial")
            return f"partial({', '.join([self.add(role, function.func), *arguments])})"
        if _is_lambda(function):
            self._lambda(role, f"{role}_of_workload", function)
            return f"{role}_of_workload"
        name = getattr(function, "__qualname__", "")
        if not name.isidentifier():
            what = f"is {name}, inside of another object" if name else f"is a {type(function).__name__}"
            raise WorkloadError(
                f"The workload's {role} {what}, whose source alone would not do. Make it a function at the top level "
                "of a notebook cell or a module."
            )
        self._define(role, name, function)
        return name

    def _define(self, role: str, name: str, value: Any) -> None:
        """Let ``name`` stand for ``value``."""
        if name in self.names:
            if self.names[name] is not value:
                raise WorkloadError(
                    f"The workload's code calls two different things {name}, in different modules. Rename one."
                )
            return
        self.names[name] = value
        if isinstance(value, types.ModuleType):
            self._check_not_ours(role, value.__name__)
            own = value.__name__ == name
            self._import(f"import {name}" if own else f"import {value.__name__} as {name}")
        elif module := _importable(value):
            self._check_not_ours(role, module)
            self._import(f"from {module} import {value.__name__}" + (f" as {name}" if value.__name__ != name else ""))
        elif _is_lambda(value):
            self._lambda(role, name, value)
        elif isinstance(value, types.FunctionType | type) and value.__name__ != name:
            self._define(role, value.__name__, value)
            self.definitions.append(f"{name} = {value.__name__}")
            self.defined.append(name)
        elif isinstance(value, types.FunctionType | type):
            self._add(role, name, _source(role, name, value), _globals(value))
            self.lazy_annotations |= _has_lazy_annotations(value)
        else:
            self.definitions.append(f"{name} = {self._plain(role, name)(value)}")
            self.defined.append(name)

    def _lambda(self, role: str, name: str, function: types.FunctionType) -> None:
        """Define a lambda as a function of that name."""
        node, source = _lambda_node(role, function)
        for argument in other_defaults(node.args, function, function.__globals__):
            raise _changed(f"The workload's {role} is a lambda whose default of {argument}", "Define it")
        for attribute in attributes_of(function):
            raise _changed(f"The workload's {role} is a lambda whose attribute {attribute}", "Define it")
        body = ast.get_source_segment(source, node.body) or ast.unparse(node.body)
        body = f"(\n        {body}\n    )" if "\n" in body else body  # a return ends with its line
        written = f"def {name}({ast.unparse(node.args)}):\n    return {body}"
        if not returns_like(written, function, source):
            raise _another_source(f"The workload's {role} is a lambda that")
        self.names[name] = function
        self._add(role, name, written, function.__globals__)

    def _add(self, role: str, name: str, source: str, known: dict[str, Any]) -> None:
        """Add a definition; before it what it uses of its module, but functions and classes that are called later."""
        used = statement(ast.parse(source).body[0], ())
        later = {name for name in used.late | used.binds_late if isinstance(known.get(name), types.FunctionType | type)}
        self._names_in(role, (used.reads | used.late | used.binds_late) - (later - used.reads), known)
        self.definitions.append(source)
        self.defined.append(name)
        self._names_in(role, later, known)
        for node in ast.walk(ast.parse(source)):
            module = _module_at(node, known) if isinstance(node, ast.Attribute) else None
            if module and "." in module.__name__ and module.__name__.partition(".")[0] not in _BRING_THEIRS:
                self._import(f"import {module.__name__}")

    def _names_in(self, role: str, names: Collection[str], known: dict[str, Any]) -> None:
        """Define what some code calls so."""
        for name in sorted(names):
            if name in known and not (hasattr(builtins, name) and known[name] is getattr(builtins, name)):
                self._define(role, name, known[name])

    def _import(self, line: str) -> None:
        if line not in self.imports:
            self.imports.append(line)

    def _plain(self, role: str, name: str = "") -> Callable[[Any], str]:
        def written(value: Any) -> str:
            if _is_plain(value) and len(text := repr(value)) <= _LONGEST_VALUE:
                with suppress(ValueError, SyntaxError):  # not a number, for example
                    if ast.literal_eval(text) == value and self._is_new(value):
                        return _with_ordered_sets(value)
            what = f"{name}, a {type(value).__name__} of the notebook" if name else f"a {type(value).__name__}"
            raise WorkloadError(
                f"The workload's {role} uses {what}, which cannot be written into a script. Make it inside of the "
                "function, or in a module that the script can import."
            )

        return written

    def _is_new(self, value: Any) -> bool:
        """Return whether no list, dict or set in a value was written down before: the script would have two of it."""
        held = [*_containers(value)]
        known = {*map(id, self._containers)}
        self._containers += held
        return len({*map(id, held)} - known) == len(held)

    def _check_not_ours(self, role: str, module: str) -> None:
        if module.partition(".")[0] == _OURS:
            raise WorkloadError(
                f"The workload's {role} is of {module}, which the script shall do without. Load a ready-made workload "
                "by its name, and write your own without the toolkit's parts."
            )


def _module_at(node: ast.AST, known: dict[str, Any]) -> types.ModuleType | None:
    """Return the module that an expression such as ``a.b`` stands for, if that was imported by its name."""
    if isinstance(node, ast.Name):
        value = known.get(node.id)
    elif isinstance(node, ast.Attribute) and (package := _module_at(node.value, known)):
        value = sys.modules.get(f"{package.__name__}.{node.attr}")
    else:
        value = None
    return value if isinstance(value, types.ModuleType) else None


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(part) for item in value.items() for part in item)
    return type(value) in _PLAIN


def _with_ordered_sets(value: Any) -> str:
    """Return a plain value as code; a set is filled in its order, which decides that of the new one."""
    if type(value) is set:
        return f"set([{', '.join(map(repr, value))}])"
    if type(value) is dict:
        return f"{{{', '.join(f'{key!r}: {_with_ordered_sets(part)}' for key, part in value.items())}}}"
    if type(value) in (list, tuple):
        inner = ", ".join(map(_with_ordered_sets, value))
        return f"[{inner}]" if type(value) is list else f"({inner}{',' * (len(value) == 1)})"
    return repr(value)


def _containers(value: Any) -> Iterator[Any]:
    """Yield the lists, dicts and sets in a value, each as often as it is there."""
    if isinstance(value, list | dict | set):
        yield value
    if isinstance(value, list | tuple | set | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _containers(part)


def _importable(value: Any) -> str:
    """Return the module that a script can import this object from under its name; empty for none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not name.isidentifier():
        return ""
    try:
        return module if getattr(importlib.import_module(module), name, None) is value else ""
    except ImportError:
        return ""


def _globals(value: Any) -> dict[str, Any]:
    if isinstance(value, types.FunctionType):
        return value.__globals__
    if value.__module__ == "__main__" and functions_of(value):
        return globals_of(value)
    return vars(importlib.import_module(value.__module__))


def _has_lazy_annotations(value: Any) -> bool:
    functions = [value] if isinstance(value, types.FunctionType) else functions_of(value)
    return any(function.__code__.co_flags & _LAZY for function in functions)


def _source(role: str, name: str, value: Any) -> str:
    if isinstance(value, types.FunctionType) and value.__closure__:
        raise WorkloadError(
            f"The workload's {role} uses {name}, which takes {value.__code__.co_freevars[0]} from the function around "
            "it. Define it at the top level of a cell."
        )
    try:
        if isinstance(value, type) and value.__module__ == "__main__":
            return class_source(value)
        source = inspect.getsource(value).rstrip()
        return source if isinstance(value, type) else _definition(role, name, value, source)
    except ValueError as error:
        raise _changed(f"The workload's {role} uses {name}, whose {error}", f"Define {name}") from None
    except (OSError, TypeError):
        where = "a module that the script can import" if isinstance(value, type) else "a notebook cell or a module"
        raise WorkloadError(
            f"The workload's {role} uses {name}, whose source is not known. Define it in {where}, and load the "
            "workload again."
        ) from None


def _definition(role: str, name: str, function: types.FunctionType, source: str) -> str:
    """Return the code that makes a function, at no indentation.

    Raises:
        WorkloadError: there is none, or its defaults have changed.
    """
    around = "".join(inspect.findsource(function)[0])
    for text in _without_indentation(source):
        with suppress(SyntaxError):
            if is_definition_of(text, function, around):
                break
    else:
        raise _another_source(f"The workload's {role} uses {name}, which")
    node = ast.parse(text).body[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != name:
        raise _another_source(f"The workload's {role} uses {name}, which")
    for argument in other_defaults(node.args, function, function.__globals__):
        raise _changed(f"The workload's {role} uses {name}, whose default of {argument}", f"Define {name}")
    for attribute in attributes_of(function):
        raise _changed(f"The workload's {role} uses {name}, whose attribute {attribute}", f"Define {name}")
    return text


def _without_indentation(source: str) -> Iterator[str]:
    """Yield a definition inside of a block as it would stand at the top level: its lines, then its code."""
    yield textwrap.dedent(source) if source[:1].isspace() else source
    with suppress(SyntaxError):
        yield "\n".join(map(ast.unparse, ast.parse(f"if True:\n{source}").body[0].body))  # type: ignore[attr-defined]


def _is_lambda(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__name__ == "<lambda>"


def _another_source(what: str) -> WorkloadError:
    return WorkloadError(
        f"{what} cannot be written into a script: the source that is found for it is not the code that runs. Define it "
        "at the top level of a cell, with def or class, and load the workload again."
    )


def _changed(what: str, define: str) -> WorkloadError:
    return WorkloadError(
        f"{what} was changed after it was defined, or something was that it is made of. {define} as it shall be in one "
        "cell, and load the workload again."
    )


def _lambda_node(role: str, function: types.FunctionType) -> tuple[ast.Lambda, str]:
    """Return the lambda in the statement that it is part of, and that statement."""
    if function.__closure__:
        raise WorkloadError(
            f"The workload's {role} is a lambda that takes {function.__code__.co_freevars[0]} from the function around "
            "it. Define it at the top level of a cell."
        )
    try:
        lines, _ = inspect.findsource(function)
        tree = ast.parse("".join(lines))
    except (OSError, TypeError, SyntaxError):
        raise WorkloadError(
            f"The workload's {role} is a lambda whose source is not known. Write it as a function."
        ) from None
    lambdas = (node for node in ast.walk(tree) if isinstance(node, ast.Lambda))
    there = [node for node in lambdas if node.lineno == function.__code__.co_firstlineno]
    found = {ast.unparse(node): node for node in there if is_lambda(node, function, "".join(lines))}
    if not found:
        raise _another_source(f"The workload's {role} is a lambda that")
    if len(found) > 1:
        raise WorkloadError(
            f"The workload's {role} is one of several lambdas in one line, which cannot be told apart. Write it as a "
            "function, or in a line of its own."
        )
    return next(iter(found.values())), "".join(lines)
