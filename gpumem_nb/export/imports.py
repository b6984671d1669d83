"""The imports of a script's code, and whether its names mean in the script what they meant."""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder

from ..shared.errors import WorkloadError
from .order import Order

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
PLOTTING = frozenset({"matplotlib", "seaborn", "plotly"})  # packages whose import changes nothing that is trained


def imported_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield names that imports of a module define, outside of its functions: each with what it is, written in one way.

    Of ``*`` what Python's own modules bring.
    """
    yield from _meant_by(_at_top(ast.parse(text)))


def imported_inside(text: str) -> Iterator[tuple[str, str]]:
    """Yield the same of all imports, those in functions too."""
    yield from _meant_by(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom))


def _meant_by(nodes: Iterator[ast.Import | ast.ImportFrom]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                names = _brought(node) or () if alias.name == "*" else [alias.name]
                module = f"{'.' * node.level}{node.module or ''}"
                yield from ((alias.asname or name, f"{module}.{name}") for name in names)
            else:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top


def _at_top(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(child, _DEFINITIONS):
            yield from _at_top(child)


@cache
def brought_by_all(text: str) -> frozenset[str] | None:
    """Return names that imports of ``*`` in some code bring; ``None`` if some are not of Python's own modules."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)) if "*" in text else ():
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            brought = _brought(node)
            if brought is None:
                return None
            found |= brought
    return frozenset(found)


def _brought(node: ast.ImportFrom) -> set[str] | None:
    """Names that an import of ``*`` brings; ``None`` of other modules than Python's own."""
    if (node.module or "").partition(".")[0] not in sys.stdlib_module_names or node.level:
        return None
    try:
        module = importlib.import_module(node.module or "")
    except ImportError:  # it may be there for the ranks only
        return None
    return set(getattr(module, "__all__", (name for name in vars(module) if not name.startswith("_"))))


WHO = ("rank", "size", "local_rank")
"""What scripts for DistributedDataParallel have of the ``hvd`` that ranks offer."""


def check_code(code: str, text: str) -> None:
    """Refuse a script in which the user's own code is not unchanged.

    Raises:
        WorkloadError: it does not.
    """
    ours, whole = ([ast.dump(node) for node in ast.parse(one).body] for one in (code, text))
    if not any(whole[first : first + len(ours)] == ours for first in range(len(whole))):
        raise WorkloadError(
            "Your code would stand in the script otherwise than it ran. Write its cells in plain Python, run "
            "them again, and attach again."
        )


def check_names(order: Order, bare: str) -> None:
    """Refuse names that mean one thing in the user's own code and another in the rest of the script, or nothing.

    Raises:
        WorkloadError: naming one.
    """
    source = order.source
    own = list(imported_in("\n".join([*source.imports, source.definitions])))
    if order.ddp and (_does_more(source.definitions) or any(what.partition(".")[0] == "horovod" for _, what in own)):
        raise WorkloadError(
            "Your code uses Horovod, which is not started beside DistributedDataParallel. Export without --ddp "
            "(ddp=False), or use no more of it than hvd.rank(), hvd.size() and hvd.local_rank(), without importing it."
        )
    if order.ddp and source.prepares:
        raise WorkloadError(
            "Your code uses accelerate, which would take torchrun's ranks for its own. Export without --ddp "
            "(ddp=False), or make model, optimizer and data without it."
        )
    theirs, imported = {*defined_in(bare), *_builtin_in(bare)}, dict(imported_in(bare))
    found = {"device"} if source.kind == "cells" else set()  # which cells may define anew, and not import
    clash = source.defines & ((theirs - found) | imported.keys())
    clash |= {name for name, what in own if name in theirs or imported.get(name, what) != what}
    if clash:
        star = ", or import what you need by its name instead of *" if "import *" in source.definitions else ""
        raise WorkloadError(f"Your code and the script both call something {min(clash)}. Rename yours{star}.")


def own_modules(order: Order) -> dict[str, str]:
    """Return the modules beside the notebook that the script imports, each with its folder.

    Modules that functions import, and have not imported yet, are looked for in the session's folder.
    """
    source, facts = order.source, order.facts
    nodes = list(ast.walk(ast.parse("\n".join([*source.imports, source.definitions]))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    tops = sorted({name.partition(".")[0] for name in names} - {"", *sys.stdlib_module_names})
    found = {name: facts.modules.get(name, "") for name in tops}
    there = {name: PathFinder.find_spec(name, [facts.folder]) for name, folder in found.items() if not folder}
    return {name: folder or facts.folder for name, folder in found.items() if folder or there.get(name)}


def defined_in(text: str) -> Iterator[str]:
    """Yield what a module calls something at its top level, what it imports aside."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            names = (one for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name))
            yield from (one.id for one in names if isinstance(one.ctx, ast.Store))


def _does_more(code: str) -> bool:
    """Return whether some code uses more of ``hvd`` than who a rank is."""
    nodes = [*ast.walk(ast.parse(code))]
    asking = [one.value for one in nodes if isinstance(one, ast.Attribute) and one.attr in WHO]
    return any(isinstance(one, ast.Name) and one.id == "hvd" and one not in asking for one in nodes)


def _builtin_in(text: str) -> Iterator[str]:
    """Python's own names that a module uses."""
    names = (node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))
    return (name for name in names if hasattr(builtins, name))
