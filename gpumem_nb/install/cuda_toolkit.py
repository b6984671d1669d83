"""The CUDA toolkit that a build is made with: one that the system has, or NVIDIA's wheels of the version torch pins.

A torch for CUDA 13 requires the package ``cuda-toolkit`` in one version, with libraries and headers but no compiler.
The same package brings that too, so nothing but a driver has to be on the system. Wheels for CUDA 12 bring no nvcc.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ..shared.errors import SetupError
from .long_step import long_step

USUAL = Path("/usr/local/cuda")
NAMED_BY = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
COMPILER = "nvcc,cccl,culibos"
"""Extras of ``cuda-toolkit``: the compiler, headers that CUDA's own include, what its static runtime is linked with."""
_PIN = re.compile(r"cuda-toolkit\[[^]]*\]==(?P<version>[\d.]+)")
_RELEASE = re.compile(r"release (\d+)\.")


def obtain(cuda: str, scratch: Path) -> Path:
    """A folder with all of a toolkit: the one that is named, torch's own with the compiler it pins, or the system's.

    Args:
        cuda: the version that torch is built for, ``13.0`` say. Another minor version will do.
        scratch: a folder in which wheels are put together.

    Raises:
        SetupError: there is none, and no wheels to install.
    """
    named = next((Path(os.environ[name]) for name in NAMED_BY if os.environ.get(name)), None)
    if named is not None:
        if not complete(named):
            raise SetupError(
                f"{named}, which {' or '.join(NAMED_BY)} names, is no CUDA toolkit: it has no bin/nvcc or no "
                "include/cuda_runtime.h. Name another, or none."
            )
        return named
    wheels, system = wheel_folder(cuda), on_the_system(cuda)
    if wheels is not None and not complete(wheels) and (compiler := pinned_compiler()):
        try:
            install(compiler)
        except SetupError:
            if system is None:
                raise
    if wheels is not None and complete(wheels):
        return assemble(wheels, scratch)
    if system is not None:
        return system
    raise SetupError(
        f"This torch is built for CUDA {cuda}, and no CUDA toolkit of that version (nvcc) was found. "
        "Install one, or say where it is: CUDA_HOME=/usr/local/cuda python -m gpumem_nb.install.horovod_build"
    )


def complete(folder: Path) -> bool:
    """Whether a folder has a compiler and the headers that go with it."""
    return (folder / "bin" / "nvcc").exists() and (folder / "include" / "cuda_runtime.h").exists()


def wheel_folder(cuda: str) -> Path | None:
    """Where NVIDIA's wheels for this CUDA lie together, ``nvidia/cu13``; those for CUDA 12 have a folder each."""
    try:
        found = importlib.util.find_spec(f"nvidia.cu{_major(cuda)}")
    except ModuleNotFoundError:
        return None
    places = (found.submodule_search_locations or []) if found else []
    return next((Path(place).resolve() for place in places), None)


def on_the_system(cuda: str) -> Path | None:
    """The toolkit on PATH or in its usual place, if it is of torch's major version."""
    nvcc = shutil.which("nvcc")
    candidates = [*([Path(nvcc).resolve().parent.parent] if nvcc else []), USUAL]
    return next((folder for folder in candidates if complete(folder) and release_of(folder) == _major(cuda)), None)


def release_of(folder: Path) -> str:
    """The major version of a toolkit; empty when its compiler does not say."""
    command = [str(folder / "bin" / "nvcc"), "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = _RELEASE.search(said)
    return found[1] if found else ""


def pinned_compiler() -> str | None:
    """The compiler that goes with the installed torch, for pip: ``cuda-toolkit[nvcc,cccl,culibos]==13.0.3`` say."""
    for line in importlib.metadata.requires("torch") or []:
        if found := _PIN.match(line):
            return f"cuda-toolkit[{COMPILER}]=={found['version']}"
    return None


def install(requirement: str) -> None:
    """Put the compiler into this environment, beside the libraries that torch brought."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
    with long_step(f"Installing torch's CUDA compiler, {requirement}"):
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        raise SetupError(
            f"pip could not install {requirement}: {last}. Install a CUDA toolkit yourself, and say where it is with "
            "CUDA_HOME=/usr/local/cuda"
        )


def assemble(wheels: Path, scratch: Path) -> Path:
    """A toolkit laid out as compilers and CMake expect it, of links into the wheels.

    ``bin`` is a real folder, because nvcc looks for the rest in ``bin/..``. The wheels have ``lib`` where a toolkit has
    ``lib64``, and only versioned names such as ``libcudart.so.13``, which a linker does not look for.
    """
    home = scratch / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "lib64").mkdir()
    for program in (wheels / "bin").iterdir():
        (home / "bin" / program.name).symlink_to(program)
    for library in (wheels / "lib").iterdir():
        for name in {library.name, re.sub(r"\.so\..*", ".so", library.name)}:
            with suppress(FileExistsError):
                (home / "lib64" / name).symlink_to(library)
    for folder in ("include", "nvvm"):
        (home / folder).symlink_to(wheels / folder)
    return home


def _major(cuda: str) -> str:
    return cuda.partition(".")[0]
