"""Code on a rank has the notebook's surroundings: working directory, paths, versions of modules.

What there is to say about that travels once, with the answer to the next request that runs the user's code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from ..shared.errors import text_of
from ..shared.messages import Surroundings
from .local_modules import LocalModules


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
