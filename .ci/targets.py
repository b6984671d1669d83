"""Everything behind the Makefile, by target. Needs nothing but Python, as the set-up beside it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from setup import LOG, QUIET, ROOT, VENV, Ticker, pip, run, set_up, venv_python
from torch_choice import Trouble

QUICKSTART = "notebooks/01_quickstart.ipynb"
COURSE = ROOT / "notebooks" / "course"
TWO_PROCESSES = ("--numprocesses", "2", "--dist", "loadfile")  # of pytest-xdist; the tests of a file share fixtures

HELP = """\
make setup   make .venv with everything pinned, build Horovod and the virtual GPU (once; afterwards seconds)
make lab     set up, then open JupyterLab on the quickstart (LAB_ARGS="--no-browser --port 9000" is passed on)
make demo    set up, then run the quickstart without a browser and print what it measured
make test    set up, then run the first tier of checks, in 16 minutes (needs Chromium; CHROMIUM=/path names one)
make test-full  set up, then run every check that needs no GPU: at most 75 minutes (docs/reliability.md)
make course  set up, then take the course with its answer key, and with wrong answers (docs/architecture.md)
make course-kit  put the course without its answers into dist/course-kit, and into a zip beside it
make bench   set up, then print the measured ratios beside their targets
make matrix  set up, then hold every model and habit against a plain loop (docs/compatibility.md)
make soak    set up, then half an hour of random flips and faults on four ranks (docs/reliability.md)
make lint    set up, then run ruff, mypy and the import rules
make cuda-build      set up copies of the checkout with both CUDA builds of Horovod for three torches; needs no GPU
make matrix-install  set up copies of it with other Pythons and torches (docs/install.md)
make clean   remove .venv and caches from the checkout (the built Horovod stays in your cache)

TORCH="torch==2.13.0"   another torch than the driver of this machine's GPUs decides, pip options included
HOROVOD_GPU=auto        nccl (a GPU for each rank) or staged (ranks share GPUs), for a CUDA torch
PYTHON=python3          the Python (3.11 or later) that .venv is made with"""


def main(arguments: Sequence[str]) -> int:
    """Run one of the Makefile's targets and return its exit code."""
    targets: dict[str, Callable[[], int]] = {
        "help": show_help,
        "setup": set_up,
        "lab": lab,
        "test": lambda: test("not gpu and not full"),
        "test-full": lambda: test("not gpu"),
        "demo": lambda: in_environment("-m", "gpumem_nb.demo"),
        "course": lambda: set_up() or run(pytest("not gpu", "tests/course", "-s")),
        "course-kit": course_kit,
        "bench": lambda: in_environment("-m", "tests.bench.run"),
        "matrix": lambda: in_environment("-m", "tests.matrix.run"),
        "soak": lambda: in_environment("-m", "tests.soak.run"),
        "cuda-build": lambda: in_environment("-m", "tests.install.run", "cuda"),
        "matrix-install": lambda: in_environment("-m", "tests.install.run"),
        "lint": lambda: set_up() or lint(),
        "clean": clean,
    }
    name = arguments[0] if arguments else "help"
    if name not in targets:
        print("No target {}. There are: {}".format(name, ", ".join(targets)), file=sys.stderr)
        return 1
    os.chdir(str(ROOT))
    try:
        return targets[name]()
    except Trouble as trouble:
        print(f"\n{trouble}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. Type the same command again to go on.", file=sys.stderr)
        return 130


def show_help() -> int:
    """What there is to type."""
    print(HELP)
    return 0


def clean() -> int:
    """Remove what set-up and the checks made inside the checkout."""
    for name in (".venv", "build", "dist", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".import_linter_cache"):
        shutil.rmtree(str(ROOT / name), ignore_errors=True)
    for folder in ROOT.glob("*.egg-info"):
        shutil.rmtree(str(folder), ignore_errors=True)
    return 0


def in_environment(*arguments: str) -> int:
    """Set up, then run Python in the environment."""
    return set_up() or run([str(venv_python()), *arguments])


def lab() -> int:
    """JupyterLab on the quickstart. Root (a container) has to be allowed explicitly."""
    set_up()
    as_root = ["--allow-root"] if os.geteuid() == 0 else []
    extra = shlex.split(os.environ.get("LAB_ARGS", ""))
    return run([str(VENV / "bin" / "jupyter"), "lab", *as_root, *extra, QUICKSTART])


def course_kit() -> int:
    """Copy the course for students: notebooks and pictures, without answers and what notebooks have written."""
    kit = ROOT / "dist" / "course-kit"
    shutil.rmtree(kit, ignore_errors=True)
    (kit / "pictures").mkdir(parents=True)
    for pattern in ("*.ipynb", "pictures/*.svg", "pictures/*.png"):
        for path in sorted(COURSE.glob(pattern)):
            shutil.copy(path, kit / path.relative_to(COURSE))
    archive = shutil.make_archive(str(kit), "zip", root_dir=kit.parent, base_dir=kit.name)
    print(f"{kit} and {archive}: {len(list(kit.glob('*.ipynb')))} notebooks, without answers")
    return 0


def lint() -> int:
    """Style, types and import rules; all of them run, so that one go shows everything."""
    python = str(venv_python())
    checks: list[list[str]] = [
        [python, "-m", "ruff", "check", "."],
        [python, "-m", "ruff", "format", "--check", "."],
        [python, "-m", "mypy"],
        [str(VENV / "bin" / "lint-imports")],
    ]
    codes = []
    for command in checks:
        print("$ {}".format(" ".join(Path(word).name if word == command[0] else word for word in command)), flush=True)
        codes.append(run(command))
    return max(map(abs, codes))  # negative: ended by a signal


def test(tier: str) -> int:
    """Run the tests that the marker expression ``tier`` selects. A missing browser is a failure, never a skip.

    A browser draws when it gets to it, so its tests have the machine for themselves. Ranks wait a lot, for one another
    and for what is to be seen: tests without ranks run beside them.
    """
    set_up()
    environment = dict(os.environ, CHROMIUM=find_chromium())
    prepare_two_hosts()
    prepare_optional(full="not full" not in tier)
    lint_too = [str(venv_python()), str(ROOT / ".ci" / "targets.py"), "lint"]
    unit = pytest(tier, *TWO_PROCESSES, "tests/unit", "tests/test_wheel.py")
    codes = [
        run(pytest(tier, "tests/browser"), env=environment),
        run(pytest(tier, "tests/notebook"), env=environment),
        *side_by_side(pytest(tier, "tests/cluster"), [unit, lint_too], environment),
    ]
    return max(map(abs, codes))  # negative: ended by a signal


def side_by_side(shown: list[str], others: list[list[str]], environment: dict[str, str]) -> list[int]:
    """Run a command beside others, which follow one another, and print what these said when all are done."""
    said = VENV / "beside.log"
    for other in others:
        print("$ {}   (beside; its output comes below, and is in {})".format(" ".join(other[1:]), said), flush=True)
    codes: list[int] = []
    with said.open("wb") as log:

        def follow() -> None:
            for other in others:
                codes.append(
                    subprocess.run(
                        other, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
                    ).returncode
                )

        beside = threading.Thread(target=follow)
        beside.start()
        try:
            codes.append(run(shown, env=environment))
        except KeyboardInterrupt:
            others.clear()  # those that have not begun
            raise
        finally:
            beside.join()
    print(said.read_text(errors="replace"), flush=True)
    return codes


def pytest(tier: str, *tests: str) -> list[str]:
    """Return the command that runs these tests; two of them at once share no cache."""
    return [str(venv_python()), "-m", "pytest", "-m", tier, "-p", "no:cacheprovider", *tests]


def find_chromium() -> str:
    """The browser for the panel's tests: CHROMIUM, one on PATH, or (as root on Debian) installed now."""
    named = os.environ.get("CHROMIUM")
    if named:
        if not os.access(named, os.X_OK):
            raise Trouble(f"CHROMIUM={named} is not a program: name the browser's own file.")
        return named
    found = chromium_on_path()
    if not found and may_install():
        install("Installing Chromium for the browser tests", "chromium")
        found = chromium_on_path()
    if not found:
        raise Trouble(
            "The browser tests need Chromium: install it, on Debian with: sudo apt-get install chromium "
            "(or name one: make test CHROMIUM=/path/to/chromium)."
        )
    return found


def prepare_two_hosts() -> None:
    """An ssh server for the tests of two hosts, which are skipped where there is none.

    Only in a container: elsewhere the package would start a server that everybody can reach.
    """
    programs = ("sshd", "ssh", "ip", "unshare")
    there = all(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in programs)
    if not there and may_install() and not os.path.exists("/run/systemd/system"):
        install("Installing an ssh server for the tests of two hosts", "openssh-server", "openssh-client", "iproute2")


def prepare_optional(full: bool) -> None:
    """What the tests alone need: pyarrow takes 170 MB of disk, and 35 MB of each kernel; TRL is of the second tier."""
    wanted = ["pyarrow", "bitsandbytes", "lightning", *(["trl"] if full else [])]
    there = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
    if run([str(venv_python()), "-c", there, *wanted], **QUIET):
        title = "Installing what tests of Parquet files, 8-bit optimizers and other libraries' trainers need"
        pip(title, "-c", "constraints.txt", *wanted)


def may_install() -> bool:
    """Whether packages can be added to this machine: root, on Debian."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(title: str, *packages: str) -> None:
    """Add packages of Debian's, with a line that says so; what came of it is for the caller to see."""
    with LOG.open("ab") as log, Ticker(title):
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def chromium_on_path() -> str | None:
    """Chromium under its usual names."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
