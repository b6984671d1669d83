"""Modules of people's own files on a rank: which of them changed on disk since they were imported, and their reload."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from importlib import reload
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

Version = tuple[int, int] | None
"""Of a file: nanoseconds and bytes; ``None`` when it is gone."""

_INSTALLED = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
    )
)


@dataclass
class _Imported:
    path: str
    version: Version  # loaded last, or tried


class LocalModules:
    """Notes from :meth:`watch` on which version of its file each module is made of that is no part of an installation.

    The import itself is watched: a file may change while the cell that imported it still runs.
    """

    def __init__(self) -> None:
        self._imported: dict[str, _Imported] = {}  # as imports ended: what a module needs stands before it

    def watch(self) -> None:
        """Take part in imports, right before Python's own search of ``sys.path``."""
        usual = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
        sys.meta_path.insert(usual, self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return what Python finds, with a loader that notes the version of the file."""
        spec = PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is SourceFileLoader and _is_local(spec.loader.path):
            spec.loader = _Noting(self, spec.loader.name, spec.loader.path)
        return spec

    def note(self, name: str, path: str, version: Version) -> None:
        """A module was made of this version; one that was there before keeps its place."""
        self._imported[name] = _Imported(path, version)

    def reload_changed(self) -> tuple[list[str], dict[str, Exception]]:
        """Reload the modules whose files changed, and those that import one of them.

        Returns:
            The reloaded ones, and why others could not be: they go on as they were, until their file changes again.
        """
        changed = {
            name
            for name, imported in self._imported.items()
            if name in sys.modules and _version(imported.path) != imported.version
        }
        reloaded: list[str] = []
        failed: dict[str, Exception] = {}
        for name in list(self._imported) if changed else ():
            module = sys.modules.get(name)
            if not isinstance(module, ModuleType):  # removed, or another object in its place
                continue
            if name not in changed and not _imports(module, self._imported[name].path) & {*reloaded}:
                continue
            before, version = dict(vars(module)), _version(self._imported[name].path)
            try:
                reload(module)
                reloaded.append(name)
            except Exception as error:  # whatever the user's code raises
                vars(module).clear()
                vars(module).update(before)
                failed[name], self._imported[name].version = error, version
        return reloaded, failed


class _Noting(SourceFileLoader):
    """Python's own loader, but that it reads the source: bytecode is known by the second in which it was written."""

    def __init__(self, modules: LocalModules, name: str, path: str) -> None:
        super().__init__(name, path)
        self._modules = modules

    def get_code(self, name: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        version = _version(self.path)
        super().exec_module(module)
        self._modules.note(module.__name__, self.path, version)


def _is_local(path: str) -> bool:
    return not path.startswith(_INSTALLED) and not {"site-packages", "dist-packages"} & {*path.split(os.sep)}


def _version(path: str) -> Version:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _imports(module: ModuleType, path: str) -> set[str]:
    """Return all names in the module's import statements, modules among them; none if its file cannot be read."""
    found: set[str] = set()
    with suppress(OSError, SyntaxError, ValueError, ImportError):
        for node in ast.walk(ast.parse(Path(path).read_bytes())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = resolve_name("." * node.level + (node.module or ""), module.__package__)
                found.update({origin, *(f"{origin}.{alias.name}" for alias in node.names)})
    return found
