"""Keeps mpiexec's own ports on the loopback interface, which none of its settings does.

PRRTE, Open MPI's launcher, listens on every interface for daemons on other hosts, even when there are none.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import platformdirs

_SOURCE = Path(__file__).with_name("loopback.c")
_COMPILE_TIMEOUT_S = 60


def variables() -> dict[str, str]:
    """Return what mpiexec's environment needs; nothing where there is no C compiler, and its ports stay as they are."""
    library = _library()
    if library is None:
        return {}
    return {"LD_PRELOAD": ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))}


def arguments() -> list[str]:
    """Gives the ranks the environment that they would have had: what people's code binds is their business."""
    return ["-x", f"LD_PRELOAD={os.environ.get('LD_PRELOAD', '')}"] if _library() else []


@cache
def _library() -> Path | None:
    """Return the compiled library, built once into the user's cache."""
    key = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    target = platformdirs.user_cache_path("gpumem_nb") / "loopback" / f"loopback-{os.uname().machine}-{key}.so"
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                built = Path(folder) / target.name
                compiler = shlex.split(os.environ.get("CC") or "cc")
                command = [*compiler, "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(built), "-ldl"]
                subprocess.run(command, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=True)
                built.replace(target)  # so that no process loads half a library
        except (OSError, subprocess.SubprocessError):
            return None
    return None if set(str(target)) & set(" :") else target  # which separate the entries of LD_PRELOAD
