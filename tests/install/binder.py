"""Binder's build, the quickstart and the course's first lesson in the 2 GiB that Binder gives: do they end well?

``python -m tests.install.binder`` needs root, a Python of ``binder/runtime.txt`` and control groups (version 1 or 2)
that can be written; prints what came of it, with the highest memory that processes held.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat

from tests.course.notebooks import NOTEBOOKS, answered
from tests.install.run import ROOT, copy_checkout

LIMIT_BYTES = 2 * 2**30
GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))  # of version 1 and of version 2
QUICKSTART = "notebooks/01_quickstart.ipynb"
LESSON = "notebooks/course/lesson_1_answered.ipynb"
PORT = 8899
LOOK_EVERY_S = 0.25


def main() -> int:
    """Build, run, and say what came of both; the exit code is 0 if both ended well."""
    version = (ROOT / "binder" / "runtime.txt").read_text().strip().replace("-", "")
    python = shutil.which(version)
    if python is None or os.geteuid() or not any(map(is_controllable, GROUPS)):
        print(f"SKIPPED: nothing was rehearsed, which takes root, {version} on the PATH and control groups.")
        return 0
    with tempfile.TemporaryDirectory(prefix="gpumem_nb-binder-") as scratch:
        checkout, home, environment = Path(scratch, "checkout"), Path(scratch, "home"), Path(scratch, "environment")
        copy_checkout(checkout)
        home.mkdir()
        subprocess.run([python, "-m", "venv", environment], check=True)
        variables = {"PATH": f"{environment / 'bin'}:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}
        variables |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        built = rehearse("build", [["bash", "binder/postBuild"]], checkout, variables)
        nbformat.write(answered(NOTEBOOKS[0]), checkout / LESSON)
        return built or any(rehearse_notebook(name, checkout, variables) for name in (QUICKSTART, LESSON))


def rehearse_notebook(name: str, checkout: Path, environment: Mapping[str, str]) -> int:
    """Run a notebook to its end beside JupyterLab."""
    lab = ["jupyter", "lab", "--no-browser", f"--port={PORT}", "--ServerApp.token=", "--allow-root"]
    runs = ["jupyter", "execute", name]
    return rehearse(f"{name} beside JupyterLab", [runs, lab], checkout, environment)


def rehearse(what: str, commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str]) -> int:
    """Run the first command to its end in a control group of its own, with the others beside it."""
    with control_group() as group, watched(group) as highest:
        began_s = time.monotonic()
        first, *others = [started(command, group, folder, environment) for command in commands]
        code = first.wait()
        for other in others:
            code = code or int(other.poll() is not None)  # it should run yet
            other.terminate()
            other.wait()
        took_s = time.monotonic() - began_s
    end = "ended well" if not code else f"ended with exit code {code}"
    print(f"{what}: {end} after {took_s:.0f} s; processes held {max(highest) / 2**30:.2f} GiB at most", flush=True)
    return code


def is_controllable(base: Path) -> bool:
    """Whether memory can be limited there."""
    second = base / "cgroup.subtree_control"  # of version 2
    limits = "memory" in second.read_text() if second.exists() else (base / "memory.limit_in_bytes").exists()
    return limits and os.access(base, os.W_OK)


def started(
    command: Sequence[str], group: Path, folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A process in the group, with all that it starts."""
    enter = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
    return subprocess.Popen(
        ["/bin/sh", "-c", enter, "sh", *command], cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL
    )


@contextmanager
def control_group() -> Iterator[Path]:
    """A control group of Binder's memory; whatever still runs in it is ended."""
    base = next(filter(is_controllable, GROUPS))
    group = base / f"gpumem_nb-binder-{os.getpid()}"
    group.mkdir()
    try:
        limit = next(name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists())
        (group / limit).write_text(str(LIMIT_BYTES))
        yield group
    finally:
        while pids := (group / "cgroup.procs").read_text().split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            time.sleep(LOOK_EVERY_S)
        group.rmdir()


@contextmanager
def watched(group: Path) -> Iterator[list[int]]:
    """Inside, what the group's processes hold, without what files take, is looked at again and again."""
    found, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY_S):
            stat = (group / "memory.stat").read_text()
            if held := re.search(r"^(?:total_rss|anon) (\d+)$", stat, re.MULTILINE):
                found.append(int(held[1]))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
