"""Builds the virtual GPU's allocator once per torch and source, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ...shared.errors import GpumemError, SetupError

_FOLDER = Path(__file__).parent
_SOURCES = sorted(_FOLDER.glob("*.cpp"))
_HEADERS = sorted(_FOLDER.glob("*.h"))
_FLAGS = ("-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", "-fvisibility-inlines-hidden")
_COMPILE_TIMEOUT_S = 600


def extension_path() -> Path | None:
    """Return the compiled allocator for this torch and this source, or ``None`` while it has not been built."""
    path = _target()
    return path if path.exists() else None


def build() -> Path:
    """Compile the allocator unless that has been done; safe to call from several processes at once.

    Raises:
        SetupError: no compiler, a failed compilation, or a cache folder that cannot be written.
    """
    from filelock import FileLock

    target = _target()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_suffix(".lock")):
            if not target.exists():
                _compile(target)
    except OSError as error:
        raise SetupError(
            f"The virtual GPU cannot be stored in {target.parent} ({error.strerror or error}): "
            "make that folder writable, or set XDG_CACHE_HOME to one that is."
        ) from None
    return target


def _target() -> Path:
    """Named by everything the binary depends on: it links only torch's C++ core, no Python."""
    import torch
    from platformdirs import user_cache_path

    sources = [path.read_text() for path in (*_SOURCES, *_HEADERS)]
    parts = (*sources, " ".join(_FLAGS), torch.__version__, str(torch.version.git_version), platform.machine())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return user_cache_path("gpumem_nb") / "virtual" / f"virtual_allocator-{key}.so"


def _compile(target: Path) -> None:
    """Compile beside ``target`` and move the finished file there, so that no process loads half a library."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / target.name
        command = _command(output)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_TIMEOUT_S, check=False
            )
        except FileNotFoundError:
            raise SetupError(
                f"The virtual GPU needs the C++ compiler {command[0]!r}, which was not found: "
                "install g++ (Debian: apt install g++) or set CXX to another compiler."
            ) from None
        except subprocess.TimeoutExpired:
            raise SetupError(
                f"Compiling the virtual GPU took more than {_COMPILE_TIMEOUT_S} s and was stopped: "
                "try again when the machine is less busy."
            ) from None
        if done.returncode != 0:
            raise SetupError(
                f"Compiling the virtual GPU with {command[0]!r} failed ({_first_error(done.stderr)}): "
                "set CXX to a compiler that knows C++20, such as g++ 11 or later."
            )
        output.replace(target)


def _command(output: Path) -> list[str]:
    import torch
    from torch.utils import cpp_extension

    # cpp_extension.load would also link libtorch_python; only C++ libraries that torch has loaded already are needed.
    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    libraries = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    return [
        *compiler,
        *_FLAGS,
        abi,
        *includes,
        *map(str, _SOURCES),
        "-o",
        str(output),
        *libraries,
        "-ltorch_cpu",
        "-lc10",
        "-lpthread",
    ]


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no message")


def main() -> int:
    """Build and say in one line what happened: 0 when the allocator is there, 1 when it could not be built."""
    start = time.perf_counter()
    known = extension_path()
    try:
        path = build()
    except GpumemError as error:
        print(error, file=sys.stderr)
        return 1
    verb = "was built already" if known else f"built in {time.perf_counter() - start:.0f} s"
    print(f"virtual GPU: {verb} ({path})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
