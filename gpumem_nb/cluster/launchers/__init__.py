"""The ways to start ranks: one class for each launcher, and the table in which it is listed by its name."""

from __future__ import annotations

from ...shared.errors import InvalidInput, nearest
from .base import Job, Launcher
from .mpi import MpiLauncher

__all__ = ["LAUNCHERS", "Job", "Launcher", "launcher_named"]

LAUNCHERS: dict[str, type[Launcher]] = {
    "mpi": MpiLauncher,
}


def launcher_named(name: str) -> type[Launcher]:
    """Return the launcher of this name; raises ``InvalidInput`` when there is none."""
    if not isinstance(name, str) or name not in LAUNCHERS:
        said = nearest(str(name), LAUNCHERS)
        raise InvalidInput(f"launcher={name!r} is not known. {said[0].upper()}{said[1:]}.")
    return LAUNCHERS[name]
