"""Compiling Horovod's wheel: what the machine must have, the build's environment, and what to say when it fails.

The CPU build (MPI and Gloo) is what the tests run. ``make cuda-build`` compiles the CUDA builds, on any machine.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from ..shared import processes
from ..shared.errors import SetupError
from . import cuda_toolkit
from .environment import find_compiler
from .horovod_source import fetch, patch, unpack
from .horovod_target import Target, nccl_folder
from .long_step import long_step, run_whole

FREE_GIB_NEEDED = 3
"""Source, objects and debug information of a build, with room to spare."""
JOB_GIB = 1.8
"""What one compiler process on torch's headers takes at most (measured with gcc 12 and torch 2.13: 1.72 GiB)."""
USUAL_CORE_SECONDS = 290
"""One build of the CPU target, measured on two cores."""
BUILD_TIMEOUT_S = 3600
PYTHON_TOOLS = {
    "cffi": "cffi",
    "cloudpickle": "cloudpickle",
    "packaging": "packaging",
    "psutil": "psutil",
    "setuptools": "setuptools",
    "wheel": "wheel",
    "yaml": "pyyaml",
}
"""What Horovod's setup.py imports, and how it is called on the package index."""
PERCENT = re.compile(rb"^\s*\[\s*(\d+)%\]", re.MULTILINE)


def require_tools(target: Target) -> None:
    """Check everything a build needs, so that it fails now and in a sentence.

    Raises:
        SetupError: naming what is missing and the command that installs it.
    """
    missing = [package for module, package in PYTHON_TOOLS.items() if importlib.util.find_spec(module) is None]
    if shutil.which("cmake", path=build_path()) is None:
        missing.append("cmake")
    if missing:
        raise SetupError(
            f"Building Horovod needs {', '.join(missing)}. Type: python -m pip install {' '.join(missing)}"
        )
    require_compiler()
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise SetupError(
            "Python's C headers are missing. Install them, on Debian or Ubuntu with: apt-get install python3-dev"
        )


def require_compiler() -> None:
    """Check that a C++ compiler and make are on the user's PATH.

    Raises:
        SetupError: one of them is missing.
    """
    if find_compiler() is None:
        named = os.environ.get("CXX")
        what = f"The C++ compiler named by CXX ({named}) was not found" if named else "No C++ compiler was found"
        raise SetupError(f"{what}. Install one, on Debian or Ubuntu with: apt-get install g++ make")
    if shutil.which("make") is None:
        raise SetupError("make was not found. Install it, on Debian or Ubuntu with: apt-get install make")


def require_disk(folder: Path) -> None:
    """Enough free space for a build under ``folder``.

    Raises:
        SetupError: there is too little.
    """
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < FREE_GIB_NEEDED:
        raise SetupError(
            f"Building Horovod needs {FREE_GIB_NEEDED} GiB of free disk and {folder} has {free_gib:.1f}. "
            "Free some, or name another cache folder with XDG_CACHE_HOME=/path"
        )


def build_path() -> str:
    """PATH with this environment's programs (cmake, mpicxx) first, activated or not."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def jobs() -> int:
    """Compilers at once: one for each core, as far as memory goes."""
    return max(1, min(processes.cores(), int(processes.available_bytes() / 2**30 / JOB_GIB)))


def build_environment(target: Target, scratch: Path) -> dict[str, str]:
    """Return the variables under which Horovod's setup.py builds exactly this target."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    variables = inherited | {
        "PATH": build_path(),
        "MAKEFLAGS": f"-j{jobs()}",
        "TMPDIR": str(scratch),  # where the free space was checked
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # cmake 4 refuses gloo's older minimum otherwise
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
    }
    return variables | (cuda_environment(target, scratch) if target.gpu != "none" else {})


def cuda_environment(target: Target, scratch: Path) -> dict[str, str]:
    """Return what a CUDA build adds. Horovod looks for CUDA_HOME through torch and calls nvcc for its own kernels.

    A staged build has no GPU operations but still knows of CUDA, and reduces GPU tensors through the CPU.

    Raises:
        SetupError: something that the build needs is missing.
    """
    home = str(cuda_toolkit.obtain(target.cuda, scratch))
    variables = {
        "HOROVOD_BUILD_CUDA_CC_LIST": target.cuda_capabilities,
        "CUDA_HOME": home,
        "HOROVOD_CUDA_HOME": home,
    }
    if target.gpu == "nccl":
        nccl = nccl_folder()
        if nccl is None:
            raise SetupError("NCCL's headers were not found. Set HOROVOD_NCCL_HOME or build with --gpu staged")
        variables |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_HOME": str(nccl),
            "HOROVOD_NCCL_INCLUDE": str(nccl / "include"),
            "HOROVOD_NCCL_LIB": str(linkable_nccl(nccl, scratch)),
            "HOROVOD_NCCL_LINK": "SHARED",
        }
    return variables


def linkable_nccl(nccl: Path, scratch: Path) -> Path:
    """Return a folder with ``libnccl.so``: the wheel has only ``libnccl.so.2``, which the linker does not look for."""
    if (nccl / "lib" / "libnccl.so").exists():
        return nccl / "lib"
    folder = scratch / "nccl"
    folder.mkdir()
    (folder / "libnccl.so").symlink_to(nccl / "lib" / "libnccl.so.2")
    return folder


def build_wheel(target: Target, cache: Path, destination: Path) -> Path:
    """Build the target's wheel and move it into ``destination``, where the build's log stays whatever happens.

    Raises:
        SetupError: a tool, disk or the network is missing, or the compiler failed; the sentence names the log.
    """
    require_tools(target)
    require_disk(cache)
    destination.mkdir(parents=True, exist_ok=True)
    log = destination / "build.log"
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as scratch:
        environment = build_environment(target, Path(scratch))
        with long_step("Fetching Horovod's source"):
            sdist = fetch(cache)
        source = unpack(sdist, Path(scratch))
        patch(source, target.runpath, with_cuda=target.gpu != "none")
        with long_step(
            f"Building Horovod for torch {target.torch}", lambda: compiled(log), USUAL_CORE_SECONDS / jobs()
        ):
            run_build(source, Path(scratch) / "wheel", environment, log)
        wheel = next((Path(scratch) / "wheel").glob("horovod-*.whl"))
        kept = destination / wheel.name
        os.replace(wheel, kept)
    return kept


def run_build(source: Path, into: Path, environment: dict[str, str], log: Path) -> None:
    """Run pip on the patched source. A build that is interrupted or takes too long leaves no compiler running.

    Raises:
        SetupError: it failed or took too long.
    """
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    with log.open("wb") as output:
        try:
            code = run_whole([*command, "-w", str(into), str(source)], BUILD_TIMEOUT_S, output, env=environment)
        except subprocess.TimeoutExpired:
            raise SetupError(f"Building Horovod took more than an hour and was stopped. Its log: {log}") from None
    if code:
        raise SetupError(explain_build(log))


def compiled(log: Path) -> float | None:
    """Return the fraction that make's last ``[ 42%]`` in the log names."""
    try:
        found = PERCENT.findall(log.read_bytes())
    except FileNotFoundError:
        return None
    return int(found[-1]) / 100 if found else None


def explain_build(log: Path) -> str:
    """Return one sentence for why a build failed, with the log's path."""
    text = log.read_text(errors="replace")
    where = f"The whole log: {log}"
    if "No space left on device" in text:
        return f"The disk filled up while building Horovod. Free {FREE_GIB_NEEDED} GiB and try again. {where}"
    if "Killed signal" in text or "fatal error: Killed" in text:
        return f"The compiler ran out of memory while building Horovod. Free some and try again. {where}"
    first = next((line.strip() for line in text.splitlines() if "error:" in line or "CMake Error" in line), None)
    return f"Building Horovod failed{f' ({first})' if first else ''}. {where}"
