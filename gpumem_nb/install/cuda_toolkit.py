"""The CUDA toolkit that a build is made with: one that the system has, or NVIDIA's wheels of the version torch pins.

A torch for CUDA 13 requires the package ``cuda-toolkit`` in one version, with libraries and headers but no compiler.
The same package brings that too, so nothing but a driver has to be on the system. Wheels for CUDA 12 bring no nvcc.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ..shared.errors import SetupError
from .long_step import long_step

USUAL = Path("/usr/local/cuda")
NAMED_BY = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
COMPILER = "nvcc,nvvm,crt,cccl,culibos,cudart"
"""Extras of ``cuda-toolkit``: the compiler, what it compiles with, headers that CUDA's own include, what its static
runtime is linked with, and that.

nvcc 13.0's own wheel leaves what it compiles with free, and of another release than its own the code is refused
("Unsupported .version 9.5"). Each extra pins its packages (``cuda-toolkit`` 13.0.0 to 13.2.2).
"""
ONE_RELEASE = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt")
INSTALL_TIMEOUT_S = 1800
_NEEDED = ("bin/nvcc", "include/cuda_runtime.h")
_NEEDED_OF_WHEELS = (*_NEEDED, "include/nv/target", "lib/libculibos.a")  # one file of each package
_PIN = re.compile(r"cuda-toolkit\[[^]]*\]==(?P<version>[\d.]+)")
_RELEASE = re.compile(r"release (\d+)\.")


def obtain(cuda: str, scratch: Path) -> Path:
    """Return a folder with a whole toolkit: the named one, torch's own with the compiler it pins, or the system's.

    Args:
        cuda: the version that torch is built for, ``13.0`` say. Another minor version will do.
        scratch: a folder in which wheels are put together.

    Raises:
        SetupError: there is none, and no wheels to install.
    """
    named = next((Path(os.environ[name]) for name in NAMED_BY if os.environ.get(name)), None)
    if named is not None:
        if not _have([named], _NEEDED):
            raise SetupError(
                f"{named}, which {' or '.join(NAMED_BY)} names, is no CUDA toolkit: it has no bin/nvcc or no "
                "include/cuda_runtime.h. Name another, or none."
            )
        if (release := release_of(named)) not in ("", _major(cuda)):
            raise SetupError(
                f"{named}, which {' or '.join(NAMED_BY)} names, is CUDA {release}, and this torch is built for CUDA "
                f"{cuda}. Name a toolkit of that version, or none."
            )
        return named
    wheels, system = wheel_folders(cuda), on_the_system(cuda)
    whole = _have(wheels, _NEEDED_OF_WHEELS) and of_one_release()
    if wheels and not whole and (compiler := pinned_compiler()):
        try:
            install(compiler)
        except SetupError:
            if system is None:
                raise
        wheels = wheel_folders(cuda)
    if _have(wheels, _NEEDED_OF_WHEELS):
        return assemble(wheels, scratch)
    if system is not None:
        return system
    raise SetupError(
        f"This torch is built for CUDA {cuda}, and no CUDA toolkit of that version (nvcc) was found. "
        "Install one, or say where it is: CUDA_HOME=/usr/local/cuda python -m gpumem_nb.install.horovod_build"
    )


def wheel_folders(cuda: str) -> list[Path]:
    """Return where NVIDIA's wheels for this CUDA lie: ``nvidia/cu13``, in each place that packages are installed in.

    A new interpreter is asked: pip may have added to them. Those for CUDA 12 have a folder for each package.
    """
    find = f"import importlib.util; found = importlib.util.find_spec('nvidia.cu{_major(cuda)}')"
    code = f"{find}; print(*found.submodule_search_locations, sep='\\n')"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return [Path(line) for line in answer.stdout.splitlines()] if answer.returncode == 0 else []


def on_the_system(cuda: str) -> Path | None:
    """Return the toolkit on PATH or in its usual place, if it is of torch's major version."""
    nvcc = shutil.which("nvcc")
    candidates = [*([Path(nvcc).resolve().parent.parent] if nvcc else []), USUAL]
    fitting = (home for home in candidates if _have([home], _NEEDED) and release_of(home) == _major(cuda))
    return next(fitting, None)


def release_of(folder: Path) -> str:
    """Return the major version of a toolkit; empty when its compiler does not say."""
    command = [str(folder / "bin" / "nvcc"), "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = _RELEASE.search(said)
    return found[1] if found else ""


def pinned_compiler() -> str:
    """Return pip's name of the installed torch's compiler, such as ``cuda-toolkit[nvcc,nvvm,crt]==13.0.2``."""
    pins = filter(None, map(_PIN.match, importlib.metadata.requires("torch") or []))
    return next((f"cuda-toolkit[{COMPILER}]=={pin['version']}" for pin in pins), "")


def of_one_release() -> bool:
    """Return whether nvcc and what it compiles with are, as far as they are installed."""
    releases = set()
    for name in ONE_RELEASE:
        with suppress(importlib.metadata.PackageNotFoundError):
            releases.add(tuple(importlib.metadata.version(name).split(".")[:2]))
    return len(releases) <= 1


def install(requirement: str) -> None:
    """Put the compiler into this environment, beside the libraries that torch brought.

    Raises:
        SetupError: pip could not.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    try:
        with long_step(f"Installing torch's CUDA compiler, {requirement}"):
            subprocess.run(
                [*command, requirement],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
                check=True,
            )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        late = f"it took longer than {INSTALL_TIMEOUT_S // 60} minutes"
        said = str(error.stderr or "").strip().splitlines() or [late]
        raise SetupError(
            f"pip could not install {requirement}: {said[-1]}. Install a CUDA toolkit yourself, and "
            "say where it is with CUDA_HOME=/usr/local/cuda"
        ) from None


def assemble(wheels: Sequence[Path], scratch: Path) -> Path:
    """Return a toolkit laid out as compilers and CMake expect it, of links into the wheels.

    ``bin`` is a real folder, because nvcc looks for the rest in ``bin/..``. The wheels have ``lib`` where a toolkit has
    ``lib64`` (for nvcc of 13.2 ``lib``), and only versioned names such as ``libcudart.so.13``, which a linker does not
    look for.
    """
    home = scratch / "cuda"
    for folder, laid_out in (("bin", "bin"), ("include", "include"), ("lib", "lib64"), ("nvvm", "nvvm")):
        (home / laid_out).mkdir(parents=True)
        for part in (part for wheel in wheels for part in (wheel / folder).glob("*")):
            for name in {part.name, re.sub(r"\.so\..*", ".so", part.name)}:
                with suppress(FileExistsError):
                    (home / laid_out / name).symlink_to(part)
    (home / "lib").symlink_to("lib64")
    return home


def _have(folders: Sequence[Path], needed: Iterable[str]) -> bool:
    """Return whether all of it is in one or the other."""
    return all(any((folder / name).exists() for folder in folders) for name in needed)


def _major(cuda: str) -> str:
    return cuda.partition(".")[0]
