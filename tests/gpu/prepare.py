"""An environment for tests/gpu/run.sh: prints its Python. Runs in a Python with a CUDA torch and changes nothing of it.

The environment lies in the user's cache, sees the packages of that Python, and gets what else the project needs, with
Horovod built so that ranks can share a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import runpy
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY = (
    "import cloudpickle, ipyparallel, mpi4py, plotly, pytest, pytest_timeout; import horovod.torch as hvd; "
    "assert not hvd.nccl_built()"
)


def main() -> int:
    """Make the environment if need be; returns the exit code."""
    python = Path(sys.executable)
    if not is_ready(python):
        python = environment_folder() / "bin" / "python"
        if not is_ready(python):
            make(python)
    print(python)
    return 0


def is_ready(python: Path) -> bool:
    """Whether it has everything already, as an environment of ``make setup`` with HOROVOD_GPU=staged has."""
    return python.exists() and not subprocess.run([python, "-c", READY], capture_output=True).returncode


def environment_folder() -> Path:
    """One for each Python and torch."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = f"python-{platform.python_version()}-torch-{importlib.metadata.version('torch')}"
    return cache / "gpumem_nb" / "gpu-tests" / key


def make(python: Path) -> None:
    """Make the environment around this Python, without another torch; what is going on is told on stderr."""
    folder = python.parent.parent
    print(f"Preparing {folder} (once)", file=sys.stderr)
    venv.EnvBuilder(system_site_packages=True, with_pip=True).create(folder)
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        # This Python is itself an environment, whose packages another one does not see by itself.
        site = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        (Path(site.strip()) / "torch.pth").write_text("\n".join(dict.fromkeys(filter(is_site, sys.path))) + "\n")
    held = folder / "constraints.txt"
    held.write_text(constraints())
    run(python, "-m", "pip", "install", "--disable-pip-version-check", "-c", str(held), *needs())
    run(python, "-m", "gpumem_nb.install.horovod_build", "--gpu", "staged")


def is_site(folder: str) -> bool:
    """Whether packages are installed there."""
    return folder.endswith(("site-packages", "dist-packages"))


def constraints() -> str:
    """The project's pins, without those that contradict the torch at hand."""
    scripts = ROOT / ".ci"
    sys.path.insert(0, str(scripts))  # as when it is started: it imports its neighbours
    try:
        setup = runpy.run_path(str(scripts / "setup.py"))
    finally:
        sys.path.remove(str(scripts))
    names = ((found.metadata["Name"], found.version) for found in importlib.metadata.distributions())
    installed = {setup["normal"](name): version for name, version in names if name}
    held: str = setup["hold_installed"]((ROOT / "constraints.txt").read_text(), installed)
    return held


def needs() -> list[str]:
    """What the project and its GPU tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tests = [need for need in project["optional-dependencies"]["test"] if need.startswith("pytest")]
    return [*project["dependencies"], *tests]


def run(python: Path, *arguments: str) -> None:
    """Run a step, its output on stderr."""
    code = subprocess.run([python, *arguments], stdout=sys.stderr, cwd=ROOT).returncode
    if code:
        raise SystemExit(f"Preparing the GPU tests stopped: {' '.join(arguments[:3])} failed (above).")


if __name__ == "__main__":
    raise SystemExit(main())
