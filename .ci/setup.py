"""Makes the environment that all the rest runs in: everything pinned, Horovod and the virtual GPU built."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch_choice
from torch_choice import Choice, Trouble

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "gpumem_nb-setup.json"
LOG = VENV / "setup.log"
LOCK = ROOT / ".setup.lock"
OLDEST_PYTHON = (3, 11)
# Of free disk: for a torch without and with CUDA, and where torch is there already.
CPU_GIB, CUDA_GIB, REST_GIB = 6, 12, 3
PLAIN_INTERVAL_S = 15
QUIET = {name: subprocess.DEVNULL for name in ("stdin", "stdout", "stderr")}

# What the result of set-up depends on, besides TORCH, HOROVOD_GPU and the checkout's own place.
INGREDIENTS = (
    "pyproject.toml",
    "constraints.txt",
    ".ci/setup.py",
    ".ci/torch_choice.py",
    "gpumem_nb/install/cuda_toolkit.py",
    "gpumem_nb/install/horovod_*.py",
    "gpumem_nb/memory/virtual_gpu/build.py",
    "gpumem_nb/**/*.cpp",
    "gpumem_nb/**/*.h",
)


def set_up() -> int:
    """Make the environment, unless its stamp says that it is there already."""
    torch = torch_for(read_stamp())
    if not is_complete(torch):
        with alone():
            if not is_complete(torch):  # which another set-up has seen to meanwhile
                make_all(torch)
    return 0


def is_complete(torch: Choice) -> bool:
    """Whether everything is there, with this torch."""
    known = read_stamp()
    return known == wanted_state(known, torch) and not must_be_remade(known)


def wanted_state(known: dict[str, Any], torch: Choice) -> dict[str, Any]:
    """What a complete environment's stamp says."""
    return {
        "ingredients": fingerprint(ROOT),
        "gpu": horovod_gpu(),
        "torch": torch.requirement,
        "root": str(ROOT),
        "named": was_named(known),
        "python": known.get("python"),
    }


def make_all(torch: Choice) -> None:
    """Everything that is not there yet, one step after another."""
    known = read_stamp()
    state, remake = wanted_state(known, torch), must_be_remade(known)
    started = time.monotonic()
    print(f"Setting up with {torch.requirement}: {torch.why}.", flush=True)
    check_disk(ROOT, REST_GIB if known.get("torch") == torch.requirement else needed_gib(torch.requirement))
    check_compiler()
    python = find_python()
    if remake:
        shutil.rmtree(str(VENV), ignore_errors=True)
    make_environment(python)
    state["python"] = "{}.{}".format(*(python_version(str(venv_python())) or ("?", "?")))
    lasting = {name: state[name] for name in ("root", "named", "python")}
    # Should anything fail from here on, that much is known of what is there.
    STAMP.write_text(json.dumps(lasting | {"torch": torch.requirement if state["named"] else known.get("torch")}))
    install_torch(torch)
    STAMP.write_text(json.dumps(lasting | {"torch": torch.requirement}))
    install_rest()
    build("Horovod", "-m", "gpumem_nb.install.horovod_build", "--gpu", horovod_gpu())
    build("the virtual GPU", "-m", "gpumem_nb.memory.virtual_gpu.build")
    STAMP.write_text(json.dumps(state))
    print(f"Set-up is complete ({clock(time.monotonic() - started)}).")


@contextmanager
def alone() -> Iterator[None]:
    """One set-up of a checkout at a time: a second one waits, and finds what the first has made."""
    try:
        lock = LOCK.open("a")
    except OSError as error:
        raise Trouble(f"{ROOT} cannot be written ({error.strerror}): take a checkout in a folder of yours.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up of this checkout is running; waiting for it.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # some network file systems have no locks
            pass
        yield


def was_named(known: dict[str, Any]) -> bool:
    """Whether somebody named this torch, now or when the environment was made."""
    return bool(os.environ.get("TORCH") or known.get("named"))


def torch_for(known: dict[str, Any]) -> Choice:
    """The torch to have: what suits the machine, unless this environment was made with one that should stay.

    What somebody named stays until something else is named. So does a torch for GPUs where none is seen: a checkout may
    be shared with a machine that has them, and a driver may come back.
    """
    there, forget = known.get("torch"), "make clean forgets it"
    if there and known.get("named") and not os.environ.get("TORCH"):
        return Choice(there, "", f"TORCH named it when this environment was made ({forget})")
    try:
        choice = torch_choice.choose()
    except Trouble as trouble:
        if not there:
            raise
        print(f"{trouble} Until then: {there}, which is here.", flush=True)
        return Choice(there, "", f"this environment has it ({forget})")
    if there and needed_gib(choice.requirement) < needed_gib(there) and not os.environ.get("TORCH"):
        return Choice(there, "", f"this environment has it, though no GPU is seen here ({forget})")
    return choice


def must_be_remade(known: dict[str, Any]) -> bool:
    """Whether what is there cannot be used: it was moved, or made with another Python than is there, or named, now."""
    if not known:
        return False
    named = os.environ.get("PYTHON", "python3")
    wanted = python_version(named) if named != "python3" else None
    there = python_version(str(venv_python()))
    versions = {"{}.{}".format(*version) for version in (there or (0, 0), wanted) if version}
    return known.get("root") != str(ROOT) or ("python" in known and versions != {known["python"]})


def run(command: Sequence[str], **options: Any) -> int:
    """Run a program to its end and return its exit code; Ctrl-C reaches it too, and it is given the time to tidy up."""
    interrupted = False
    with subprocess.Popen(command, **options) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    return code


def horovod_gpu() -> str:
    """How Horovod handles GPU tensors, for a CUDA torch."""
    return os.environ.get("HOROVOD_GPU") or "auto"


def fingerprint(root: Path) -> str:
    """A hash of the files that set-up depends on."""
    total = hashlib.sha256()
    for pattern in INGREDIENTS:
        for path in sorted(root.glob(pattern)):
            total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def read_stamp() -> dict[str, Any]:
    """What the last set-up was made of; torch, place and Python alone if it was not completed."""
    try:
        known = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def venv_python() -> Path:
    """The environment's own Python."""
    return VENV / "bin" / "python"


def needed_gib(torch: str) -> int:
    """Of free disk, for everything."""
    return CPU_GIB if "+cpu" in torch or "/cpu" in torch else CUDA_GIB


def check_disk(folder: Path, wanted_gib: float) -> None:
    """Torch, JupyterLab and one build of Horovod have to fit."""
    free_gib = shutil.disk_usage(str(folder)).free / 2**30
    if free_gib < wanted_gib:
        raise Trouble(
            f"Set-up needs {wanted_gib} GiB of free disk and {folder} has {free_gib:.1f}: "
            "free some and type make setup again."
        )


def check_compiler() -> None:
    """Horovod and the virtual GPU are compiled here."""
    named = os.environ.get("CXX", "").split()[:1]
    if not any(shutil.which(name) for name in named or ["c++", "g++", "clang++"]):
        raise Trouble("No C++ compiler was found: install one, on Debian or Ubuntu with: apt-get install g++ make")


def find_python() -> str:
    """A Python that is new enough: PYTHON if it was named, else the one running this, else a newer one beside it."""
    named = os.environ.get("PYTHON", "python3")
    others = [] if named != "python3" else [sys.executable, "python3.13", "python3.12", "python3.11", "python3.14"]
    for candidate in [named, *others]:
        version = python_version(candidate)
        if version and version >= OLDEST_PYTHON:
            check_python_parts(candidate)
            return candidate
    found = python_version(named)
    has = f"{named} is Python {found[0]}.{found[1]}" if found else f"{named} is not a Python"
    raise Trouble(
        f"Python 3.11 or later is needed and {has}: install one, then type: make setup PYTHON=/path/to/python3.11"
    )


def python_version(program: str) -> tuple[int, int] | None:
    """Major and minor version of a Python program, or None if it is none."""
    try:
        answer = subprocess.run(
            [program, "-c", "import sys; print(*sys.version_info[:2])"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        major, minor = answer.stdout.split()
    except (OSError, ValueError):
        return None
    return int(major), int(minor)


def check_python_parts(program: str) -> None:
    """Debian ships venv and the C headers apart from Python."""
    if subprocess.run([program, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL).returncode:
        raise Trouble(f"{program} cannot make environments: on Debian or Ubuntu type: apt-get install python3-venv")
    code = "import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
    if subprocess.run([program, "-c", code]).returncode:
        raise Trouble(f"{program} has no C headers (Python.h): on Debian or Ubuntu type: apt-get install python3-dev")


def make_environment(python: str) -> None:
    """A fresh .venv, or the one that is there if it works."""
    version = python_version(str(venv_python())) if venv_python().exists() else None
    if version and version >= OLDEST_PYTHON:
        return
    shutil.rmtree(str(VENV), ignore_errors=True)
    answer = subprocess.run([python, "-m", "venv", str(VENV)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if answer.returncode:
        said = answer.stdout.decode(errors="replace").strip().splitlines() or ["no output"]
        raise Trouble(f"{python} could not make {VENV}: {said[-1]}")


def install_torch(torch: Choice) -> None:
    """Torch first and by itself: a range, or a package that depends on it, could bring gigabytes of another build."""
    wanted = shlex.split(torch.requirement)
    elsewhere = ["--extra-index-url", torch.index] if torch.index and not is_offered(*wanted) else []
    if elsewhere and torch.instead and not is_offered(*elsewhere, *wanted) and is_offered(torch.instead):
        print(
            f"No index has {torch.requirement} for this Python, so set-up takes {torch.instead}, which computes on the"
        )
        print(
            f"CPU as well. That costs {torch.instead_costs}. Another Python may have it: PYTHON=python3.11.", flush=True
        )
        check_disk(ROOT, CUDA_GIB)
        wanted, elsewhere = [torch.instead], []
    pinned = ["-c", "constraints.txt"] if torch_choice.VERSION in torch.requirement else []
    pip(f"Installing {' '.join(wanted)}", *pinned, *elsewhere, *wanted)


def is_offered(*wanted: str) -> bool:
    """Whether the usual package index has it, or one that is named among the options."""
    command = [str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    with Ticker(f"Looking for {wanted[-1]} in the package index"):
        return run([*command, "--retries", "1", "--dry-run", "--no-deps", *wanted], **QUIET) == 0


def install_rest() -> None:
    """The package itself and everything pinned, without touching torch or what torch brought along."""
    held = VENV / "constraints.txt"
    held.write_text(hold_installed((ROOT / "constraints.txt").read_text(), installed_versions()))
    pip("Installing JupyterLab, ipyparallel, Open MPI and the rest", "-c", str(held), "-e", ".[lab,test]")


def installed_versions() -> dict[str, str]:
    """What the environment holds, by normalised name."""
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name']}))"
    )
    answer = subprocess.run([str(venv_python()), "-c", code], stdout=subprocess.PIPE, check=True)
    return {normal(name): version for name, version in json.loads(answer.stdout).items()}


def normal(name: str) -> str:
    """A package's name as package indexes compare it."""
    return name.lower().replace("_", "-").replace(".", "-")


def hold_installed(constraints: str, installed: dict[str, str]) -> str:
    """The constraints without lines that contradict the torch at hand: another torch may need another sympy."""
    torch = installed["torch"]
    lines = [f"torch=={torch}"]
    default = torch.split("+")[0] == torch_choice.VERSION
    for line in constraints.splitlines():
        name, pinned, _ = line.partition("==")
        contradicted = pinned and installed.get(normal(name), line[len(name) + 2 :]) != line[len(name) + 2 :]
        if default or not contradicted:
            lines.append(line)
    return "\n".join(lines) + "\n"


def pip(title: str, *arguments: str) -> None:
    """Install quietly, with a line that says what is going on; on failure one sentence and the log."""
    command = [str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    with Ticker(title), LOG.open("ab") as log:
        begin = log.tell()
        code = run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        if code:
            said = LOG.read_bytes()[begin:].decode(errors="replace")
            raise Trouble(explain_pip(said, arguments[-1]))


def explain_pip(output: str, wanted: str) -> str:
    """One sentence for what pip said."""
    signs = ("NewConnectionError", "Failed to establish", "Max retries", "name resolution", "timed out")
    if any(sign in output for sign in signs):
        return "The package index cannot be reached: check the network and pip's settings (pip config list)."
    if "No space left on device" in output:
        return "The disk is full: free some space and type make setup again."
    if "No matching distribution" in output:
        lacking = re.findall(r"No matching distribution found for (\S+)", output)
        what = lacking[0] if lacking else wanted
        return f"The package index has no {what} for this Python: name another with TORCH= or PYTHON= (log: {LOG})."
    errors = [line[len("ERROR: ") :] for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = errors[0].rstrip(".") if errors else "its log says why"
    return f"pip could not install {wanted}: {reason} (log: {LOG})."


def build(what: str, *arguments: str) -> None:
    """Run one of the package's own builders, which report for themselves."""
    if run([str(venv_python()), *arguments]):
        raise Trouble(f"Set-up stopped because {what} could not be built: see the line above.")


class Ticker:
    """A line that shows that a step is still going on, and at its end how long it took."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rewrites = sys.stdout.isatty()
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self.keep_showing, daemon=True)

    def __enter__(self) -> None:
        self.started = time.monotonic()
        self.show(f"{self.title} ...")
        self.thread.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.finished.set()
        self.thread.join()
        outcome = "failed after" if kind else "done in"
        self.show(f"{self.title}: {outcome} {clock(time.monotonic() - self.started)}", end="\n")

    def keep_showing(self) -> None:
        """Say so every second on a terminal, every quarter of a minute elsewhere."""
        while not self.finished.wait(1 if self.rewrites else PLAIN_INTERVAL_S):
            self.show(f"{self.title} ... {clock(time.monotonic() - self.started)}")

    def show(self, text: str, end: str = "") -> None:
        """Rewrite the line on a terminal, add one elsewhere."""
        print(("\r\x1b[K" + text) if self.rewrites else text, end=end if self.rewrites else "\n", flush=True)


def clock(seconds: float) -> str:
    """Minutes and seconds, ``2:05``; below a minute ``12 s``."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
