"""Horovod for this environment: built once, cached, installed and proven.

``python -m gpumem_nb.install.horovod_build [--gpu nccl|staged|auto] [--force]``

Horovod has no wheels, and its last source release does not compile against today's torch as it is. The wheel built here
is kept in the user's cache under a key of everything it depends on, so the two minutes are spent once for each torch,
Python, MPI and CUDA. On CUDA ``--gpu nccl`` is the fast way with a GPU for every rank, ``staged`` lets ranks share one.
The checks of this repository run the CPU way; ``make cuda-build`` compiles both CUDA ways.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import filelock
import platformdirs

from ..shared.errors import SetupError
from .horovod_compile import build_wheel
from .horovod_source import VERSION, digest
from .horovod_target import GPU_MODES, Target, detect
from .long_step import long_step, run_whole
from .mpi_tools import HERE, LAUNCH_VARIABLES, require_tool

RECIPE = 6
"""Raised with every change to the patches or the build's environment, so that older wheels are not taken for new."""
PROOF_TIMEOUT_S = 120
RANKS = 2


def cache_folder() -> Path:
    """Return where wheels, their logs and the source are kept.

    Raises:
        SetupError: it cannot be made.
    """
    folder = platformdirs.user_cache_path("gpumem_nb") / "horovod"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"The cache folder {folder} cannot be made ({error.strerror}). Name another with XDG_CACHE_HOME=/path"
        ) from None
    return folder


@contextmanager
def only_builder(cache: Path) -> Iterator[None]:
    """Hold the cache: a second builder waits and then finds the first one's wheel.

    Raises:
        SetupError: the cache cannot be written.
    """
    lock = filelock.FileLock(cache / "lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        with long_step("Another build of Horovod is running here; waiting for it"):
            lock.acquire()
    except OSError as error:
        raise SetupError(
            f"The cache folder {cache} cannot be written ({error.strerror}). Make it yours, or name another with "
            "XDG_CACHE_HOME=/path"
        ) from None
    try:
        for left in cache.glob("build-*"):  # by a build that was killed: no other build runs here now
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        lock.release()


def cached_wheel(target: Target, cache: Path) -> Path | None:
    """Return the wheel built earlier for an equal target."""
    return next((cache / target.key()).glob("horovod-*.whl"), None)


def obtain_wheel(target: Target, cache: Path, force: bool = False) -> Path:
    """Return the target's wheel, from the cache or built now. The caller holds :func:`only_builder`."""
    kept = None if force else cached_wheel(target, cache)
    if kept is not None:
        return kept
    wheel = build_wheel(target, cache, cache / target.key())
    (cache / target.key() / "target.json").write_text(json.dumps(asdict(target), indent=2))
    return wheel


def is_installed(wheel: Path) -> bool:
    """Return whether this very wheel is what the environment has: pip records the hash of a file it installed."""
    try:
        record = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return record is not None and digest(wheel) in record


def install(wheel: Path) -> None:
    """Put the wheel into this environment in place of whatever Horovod was there.

    Raises:
        SetupError: pip could not.
    """
    options = ["--quiet", "--no-deps", "--no-index", "--force-reinstall"]
    command = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        raise SetupError(
            f"pip could not install Horovod's wheel: {last}. Try it yourself with: {' '.join(command[1:])}"
        )


def prove(target: Target) -> None:
    """Run the two-rank all-reduce.

    Raises:
        SetupError: it failed or did not end in time, with the last thing the ranks said.
    """
    command = [str(require_tool("mpiexec")), "-n", str(RANKS), sys.executable, "-m", "gpumem_nb.engine.probe"]
    environment = os.environ | LAUNCH_VARIABLES | HERE | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as output:
        try:
            # Run where this package is, installed or not.
            folder = Path(__file__).parents[2]
            code = run_whole([*command, device_policy(target)], PROOF_TIMEOUT_S, output, env=environment, cwd=folder)
        except subprocess.TimeoutExpired:
            raise SetupError(
                f"Two ranks did not finish one all-reduce within {PROOF_TIMEOUT_S} s and were stopped. "
                "A firewall on the loopback interface does this; otherwise rebuild with: "
                "python -m gpumem_nb.install.horovod_build --force"
            ) from None
        output.seek(0)
        said = output.read().decode(errors="replace")
    if code:
        raise SetupError(
            f"Horovod is installed, but two ranks could not all-reduce: {reason(said)}. "
            "Rebuild it with: python -m gpumem_nb.install.horovod_build --force"
        )


def device_policy(target: Target) -> str:
    """Return the device of the proof's tensors. NCCL refuses two ranks on one GPU: the CPU path is proven then."""
    if target.gpu == "none":
        return "cpu"
    code = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    devices = int(answer.stdout.strip() or 0) if answer.returncode == 0 else 0
    if devices >= RANKS:
        return "each"
    return "shared" if devices and target.gpu == "staged" else "cpu"


def reason(said: str) -> str:
    """Return the line of the ranks' output that most likely tells why."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "error:" in line or line.startswith("rank ")]
    return (telling or lines or ["they said nothing"])[0].rstrip(".")


def ensure(gpu: str = "auto", force: bool = False) -> Path:
    """Build (or take from the cache), install and prove Horovod; return the wheel's path.

    Args:
        gpu: ``nccl``, ``staged`` or ``auto``; without meaning for a CPU torch.
        force: build again even if the cache has it.

    Raises:
        SetupError: one sentence with the remedy and, once the compiler ran, the path of its log.
    """
    target = detect(gpu, RECIPE)
    cache = cache_folder()
    with only_builder(cache):
        wheel = obtain_wheel(target, cache, force)
        if not is_installed(wheel):
            with long_step("Installing Horovod"):
                install(wheel)
    with long_step("Proving Horovod with an all-reduce of two ranks"):
        prove(target)
    return wheel


def main(arguments: list[str] | None = None) -> int:
    """Return the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gpumem_nb.install.horovod_build", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--gpu", choices=GPU_MODES, default="auto", help="how GPU tensors are reduced (CUDA torch only)"
    )
    parser.add_argument("--force", action="store_true", help="build again even if the cache has the wheel")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a terminated build must end its compilers too
    try:
        wheel = ensure(options.gpu, options.force)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.TimeoutExpired as error:
        asked = " ".join(map(str, error.cmd))
        print(f"No answer in {error.timeout:.0f} s, try again when the machine is less busy: {asked}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped. Nothing is left running; start it again whenever you like.", file=sys.stderr)
        return 130
    print(f"Horovod {VERSION} is ready. Its wheel: {wheel}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
