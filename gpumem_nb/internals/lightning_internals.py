"""Undocumented parts of Lightning, looked up on what people made or imported: nothing is imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

CHECKED_WITH = ("2.6.6",)
_LOGS = ("log", "log_dict")
_OF_MPI = tuple(f"{package}.plugins.environments.mpi" for package in ("lightning.fabric", "lightning_fabric"))


class _SeesNoMpi(MetaPathFinder):
    """Loads Lightning's module about MPI, and has it find none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as Python does."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _OF_MPI else None
        if spec is None or spec.loader is None:
            return None
        load: Callable[[ModuleType], None] = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            module.MPIEnvironment.detect = staticmethod(lambda: False)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]  # of this one module
        return spec


def see_no_mpi() -> None:
    """Let Lightning take this process for an ordinary one when it is imported, also where MPI has started it."""
    sys.meta_path.insert(0, _SeesNoMpi())


@contextmanager
def logging_to(module: Any, log: Callable[[str, Any], None], trainer: Any) -> Iterator[None]:
    """Inside, what a module logs goes to ``log(name, value)``; its ``trainer`` is this one, or there is none."""
    before, module._trainer = module._trainer, trainer
    own = {name: vars(module)[name] for name in _LOGS if name in vars(module)}

    def log_one(name: str, value: Any, *_: Any, **__: Any) -> None:
        log(name, value)

    def log_dict(values: Any, *_: Any, **__: Any) -> None:
        for name, value in values.items():
            log(name, value)

    vars(module).update(log=log_one, log_dict=log_dict)
    try:
        yield
    finally:
        for name in _LOGS:
            vars(module).pop(name, None)
        vars(module).update(own)
        module._trainer = before


def syncs_batch_norm(trainer: Any) -> bool:
    """Return whether a ``Trainer`` would have batch norm take statistics over all processes, if it had several."""
    return trainer._accelerator_connector._layer_sync is not None
