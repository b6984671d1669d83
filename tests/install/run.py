"""Set-up as a new user types it, in a copy of this checkout for each torch and Python: does it end, and do ranks train?

``make cuda-build``: both CUDA builds of Horovod, for each of three torches, are compiled, linked, imported and proven
on the CPU; needs no GPU, no toolkit, 12 GB of disk and the package index. ``python -m tests.install.run cuda 2.15``
builds for one of these torches. ``make matrix-install``: Pythons and torches; writes docs/install.md. It takes an
hour; ``python -m tests.install.run matrix python3.12`` tries some of the Pythons and leaves the others' rows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from tests.install.check import BEGIN, STEPS

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "docs" / "install.md"
MARKER = "<!-- the rest is written by make matrix-install -->\n"
PYTHONS = ("python3.11", "python3.12", "python3.13")
TORCHES = ("torch==2.8.*", "torch==2.9.*", "torch==2.13.*", "torch==2.15.*", "")  # the last: what set-up chooses
# Of the builds of torch that the index has for every platform, for which a plain number of a version stands: with CUDA
# 13.0 whose packages leave the compiler's parts free, with one that pins them, and the newest, with CUDA 13.2.
CUDA_TORCHES = ("torch===2.11.0", "torch===2.13.0", "torch===2.15.0")
OTHERS = ("CUDA_", "HOROVOD_", "MAKE", "MFLAGS")  # what a row's own variables shall not be mixed with
CAPABILITY = "90"  # nobody has to ask a GPU for it


@dataclass(frozen=True)
class Row:
    """One set-up: with this Python, this ``TORCH`` (or set-up's own choice), and other variables.

    ``horovod`` is what Horovod must have been built with.
    """

    python: str
    torch: str
    variables: Mapping[str, str]
    horovod: Set[str]

    @property
    def number(self) -> str:
        """Of its Python, such as ``3.12``."""
        return self.python.removeprefix("python")


@dataclass(frozen=True)
class Outcome:
    """What came of one: what it holds, or the sentence it ended with."""

    found: Mapping[str, object]
    sentence: str
    took_s: float
    size_gib: float


CUDA_ROWS = [
    Row("python3", torch, {"HOROVOD_GPU": mode, "HOROVOD_BUILD_CUDA_CC_LIST": CAPABILITY}, parts)
    for torch in CUDA_TORCHES
    for mode, parts in (("nccl", {"MPI", "CUDA", "NCCL"}), ("staged", {"MPI", "CUDA"}))
]


def main() -> int:
    """Set up all rows, one after another, and say what came of each; the exit code is 0 if all ended well."""
    of_cuda = sys.argv[1:2] == ["cuda"]
    if of_cuda:
        rows = cuda_rows(sys.argv[2:])
    else:
        wanted = sys.argv[2:] or PYTHONS
        there = [python for python in wanted if shutil.which(python)]
        print(f"Not here, so not tried: {', '.join(sorted(set(wanted) - set(there))) or 'none'}.", flush=True)
        rows = [Row(python, torch, {}, {"MPI"}) for python in there for torch in TORCHES]
        lacking = [row for row in rows if row.torch and not is_offered(row)]
        rows = [row for row in rows if row not in lacking]
        said = ", ".join(f"{row.torch} for Python {row.number}" for row in lacking)
        print(f"Not in the package index, so not tried: {said or 'none'}.", flush=True)
    outcomes = []
    for row in rows:
        print(f"== {row.python} {row.torch or '(what set-up chooses)'} {' '.join(row.variables.values())}", flush=True)
        outcomes.append(outcome := set_up(row))
        print(f"== {outcome.found or outcome.sentence} ({outcome.took_s:.0f} s)", flush=True)
    print("\n".join(table(rows, outcomes)))
    if not of_cuda:
        by_hand, _, before = REPORT.read_text().partition(MARKER)
        again = tuple(f"| {row.number}{after}" for row in rows for after in (".", " "))
        kept = [line for line in before.splitlines()[2:] if not line.startswith(again)]
        heading, line, *new = table(rows, outcomes)
        REPORT.write_text("\n".join([by_hand + MARKER + heading, line, *sorted(kept + new), ""]))
    return 0 if all(outcome.found for outcome in outcomes) else 1


def cuda_rows(versions: Sequence[str]) -> list[Row]:
    """Those of these torches, such as ``2.15``; all of them where none is named."""
    unknown = [one for one in versions if not any(f"==={one}." in f"{torch}." for torch in CUDA_TORCHES)]
    if unknown:
        raise SystemExit(f"There is no build for torch {unknown[0]} here: name some of {', '.join(CUDA_TORCHES)}.")
    return [row for row in CUDA_ROWS if not versions or any(f"==={one}." in f"{row.torch}." for one in versions)]


def set_up(row: Row) -> Outcome:
    """Copy the checkout, set it up with nothing in Horovod's cache, train, and leave nothing."""
    with tempfile.TemporaryDirectory(prefix="gpumem_nb-install-") as scratch:
        checkout, cache = Path(scratch) / "checkout", Path(scratch) / "cache"
        copy_checkout(checkout)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
        environment |= {"PYTHON": row.python, "TORCH": row.torch, "XDG_CACHE_HOME": str(cache), **row.variables}
        environment |= {"PIP_CACHE_DIR": str(platformdirs.user_cache_path("pip", appauthor=False))}
        began_s = time.monotonic()
        made = run(["make", "setup"], checkout, environment)
        took_s = time.monotonic() - began_s
        if made.returncode:
            return Outcome({}, last_line(made), took_s, 0)
        size_gib = sum(path.lstat().st_size for path in (checkout / ".venv").rglob("*")) / 2**30
        checked = run([".venv/bin/python", "-m", "tests.install.check"], checkout, environment)
        found = {} if checked.returncode else json.loads(checked.stdout.rpartition(BEGIN)[2].splitlines()[0])
        if not found:
            return Outcome({}, last_line(checked), took_s, size_gib)
        lacking = row.horovod - set(found["horovod"])
        if lacking or found["steps"] != STEPS:
            return Outcome({}, f"Horovod lacks {', '.join(lacking)}; {found['steps']} steps", took_s, size_gib)
        return Outcome(found, "", took_s, size_gib)


def is_offered(row: Row) -> bool:
    """Whether the package index has this torch for this Python."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--dry-run", "--no-deps", "--only-binary", ":all:", "--python-version", row.number]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *options, "--target", folder, row.torch]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def files_of_checkout() -> list[str]:
    """What git keeps, or would keep, that is there now; all files where there is no git, as of an sdist."""
    if not (ROOT / ".git").exists():
        return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and not left_out(path)]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


def left_out(path: Path) -> bool:
    """Whether it was made by set-up, by Python or by a build, and not written by anybody."""
    parts = path.relative_to(ROOT).parts
    return parts[0] in {".venv", "build", "dist"} or any("cache" in part or "egg-info" in part for part in parts)


def copy_checkout(into: Path) -> None:
    """Copy those files."""
    for name in files_of_checkout():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, into / name)


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run it to its end and show what it says."""
    answer = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(answer.stdout, flush=True)
    return answer


def last_line(answer: subprocess.CompletedProcess[str]) -> str:
    """The sentence that it ended with, without the place of a log; that of make itself says nothing."""
    lines = [line for line in answer.stdout.splitlines() if line.strip() and not line.startswith("make")]
    return re.sub(r" \(log: .*\)", "", lines[-1]) if lines else f"exit code {answer.returncode}"


def table(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> list[str]:
    """The outcomes as Markdown."""
    lines = [
        "| Python | TORCH | torch | Horovod with | set-up, s | .venv, GiB | outcome |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, outcome in zip(rows, outcomes, strict=True):
        found = outcome.found
        horovod = ", ".join(map(str, found.get("horovod", [])))  # type: ignore[call-overload]
        words = f"{STEPS} steps on two ranks" if found else outcome.sentence
        lines.append(
            f"| {found.get('python', row.number)} | {row.torch or 'not named'} | {found.get('torch', 'n/a')} "
            f"| {horovod} | {outcome.took_s:.0f} | {outcome.size_gib:.1f} | {words} |"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
