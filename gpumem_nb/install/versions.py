"""The versions that the notebook and its ranks run with, without importing any of it; no paths or machines."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess

from ..shared.version import __version__
from .mpi_tools import find_tool, mpi_version

_PACKAGES = ("torch", "horovod", "ipyparallel", "numpy", "plotly", "jupyterlab")
_NOT_KNOWN = "n/a"


def versions() -> dict[str, str]:
    """By name; ``n/a`` for what is not installed."""
    found = {"gpumem_nb": __version__, "Python": platform.python_version()}
    found |= {name: _of_package(name) for name in _PACKAGES}
    return found | {"MPI": _of_mpi(), "system": f"{platform.system()} {platform.machine()}"}


def _of_package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _NOT_KNOWN


def _of_mpi() -> str:
    mpiexec = find_tool("mpiexec")
    try:
        return mpi_version(mpiexec) if mpiexec else _NOT_KNOWN
    except (OSError, subprocess.TimeoutExpired):
        return _NOT_KNOWN
