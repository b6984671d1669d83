"""The user's own code in a script: checks that it is there unchanged, and means what it meant."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder

from ..shared.errors import WorkloadError
from .imports import imported_in
from .order import Order

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
    theirs, imported = {*defined_in(bare), *_builtin_in(bare)}, dict(imported_in(bare))
    found = {"device"} if source.kind == "cells" else set()  # which cells may define anew, and not import
    clash = source.defines & ((theirs - found) | imported.keys())
    clash |= {name for name, what in own if name in theirs or imported.get(name, what) != what}
    if clash:
        raise WorkloadError(f"Your code and the script both call something {min(clash)}. Rename yours.")


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
