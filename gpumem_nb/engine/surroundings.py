"""Code on a rank has the notebook's surroundings: working directory, paths, versions of modules.

What there is to say about that travels once, with the answer to the next request that runs the user's code.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import reload
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from ..shared.errors import text_of
from ..shared.messages import Surroundings

Version = tuple[int, int] | None
"""Of a file: nanoseconds and bytes; ``None`` when it is gone."""
_NONE_YET = (0, -1)  # is that of no file

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

    def reload_changed(self) -> tuple[list[str], dict[str, BaseException]]:
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
        failed: dict[str, BaseException] = {}
        try:
            for name in list(self._imported) if changed else ():
                module = sys.modules.get(name)
                if not isinstance(module, ModuleType):  # removed, or another object in its place
                    continue
                if name in changed or _imports(module, self._imported[name].path) & {*reloaded}:
                    version = _version(self._imported[name].path)
                    if error := _reloaded(module):
                        failed[name], self._imported[name].version = error, version
                    else:
                        reloaded.append(name)
        except KeyboardInterrupt:  # the next request tries all again, and tells of them
            for name in (*changed, *reloaded, *failed):
                self._imported[name].version = _NONE_YET
            raise
        return reloaded, failed


def _reloaded(module: ModuleType) -> BaseException | None:
    """Reload a module; returns why that cannot be done, and leaves it as it was then."""
    before = dict(vars(module))
    try:
        reload(module)
    except BaseException as error:  # whatever the user's code raises
        vars(module).clear()
        vars(module).update(before)
        if isinstance(error, KeyboardInterrupt):
            raise
        return error
    return None


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


class Surrounded:
    """Keeps one rank's surroundings like the notebook's.

    Attributes:
        modules: those of people's own files.
        notes: what there is to say.
    """

    def __init__(self) -> None:
        self.modules = LocalModules()
        self._added: frozenset[str] = frozenset()  # paths that this rank has from the notebook alone
        self._missing: set[str] = set()  # of which that was said
        self.notes: list[str] = []

    def follow(self, now: Surroundings) -> None:
        """Work where the notebook works, and look for modules where it looks first; paths of one's own come last."""
        own = [path for path in sys.path if path not in self._added]
        here = [path for path in now.paths if os.path.exists(path)]
        self._added = frozenset(now.paths).difference(own)
        sys.path[:] = [*here, *(path for path in own if path not in here)]
        gone = [path for path in now.paths if path not in here]
        try:
            os.chdir(now.folder)
        except OSError:
            gone.append(now.folder)
        for path in dict.fromkeys(gone):
            if path not in self._missing:
                self.notes.append(f"The notebook works in {path} or imports from it, and there is no such folder here.")
        self._missing.update(gone)

    def catch_up(self, variables: Mapping[str, Any], trained: Iterable[object]) -> None:
        """Reload modules that changed on disk, and note what still is of the code from before.

        Args:
            variables: those of cells.
            trained: objects whose code training runs.
        """
        reloaded, failed = self.modules.reload_changed()
        for name, error in failed.items():
            self.notes.append(
                f"{name} changed on disk and could not be reloaded ({type(error).__name__}: {text_of(error)}), so its "
                "code from before runs. Correct the file, and run this again."
            )
        if reloaded:
            what = f"Reloaded, because files changed on disk: {', '.join(reloaded)}."
            if before := _made_of(reloaded, variables):
                what += f" Of the code from before, until the cells that made them run again: {', '.join(before)}."
            self.notes.append(what)
            if any(_origin(item) in reloaded for item in trained):
                self.notes.append(
                    "What is trained was made before that: load it again, or run the cell that made it and attach it "
                    "again."
                )

    def said(self) -> tuple[str, ...]:
        """Everything in :attr:`notes`, which is said once."""
        notes = tuple(self.notes)
        self.notes.clear()
        return notes


here = Surrounded()
"""This rank's."""


def _made_of(modules: list[str], variables: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in variables.items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and _origin(value) in modules
    ]


def _origin(value: object) -> Any:
    """Return the module of a function or class, or of the class of anything else."""
    return getattr(value, "__module__", None)
