"""Everything that needs a GPU, most valuable first, in a limited time; what each part found is written when it ends.

``python -m tests.gpu.run [--seconds 240] [--out gpu-results] [--device cuda] [--small] [--nccl PYTHON] [--parts a,b]``:
parts follow each other in stages; those of one stage measure no time and run beside each other. A part that fails, or
that takes longer than it may, stops no other. Records (``tests/gpu/record.py``) are made until the time is over.
``--device cpu --small`` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

OK, FAILED, CUT, SKIPPED, NOT_RUN = "ok", "failed", "cut", "skipped", "not run"
USUAL_SECONDS = 240.0
_TAIL = 2000  # characters of a part's output in the summary
_GRACE_S = 5.0  # for a part that was told to end
_LEAST_S = 3.0  # no part begins with less
_NO_TESTS = 5  # pytest's code where all were left out


@dataclass(frozen=True)
class Part:
    """One thing to do.

    Attributes:
        name: also of its log.
        command: what follows ``python``.
        most_s: it is ended then.
        python: which.
        open_end: it goes on for as long as there is time.
    """

    name: str
    command: tuple[str, ...]
    most_s: float
    python: str = sys.executable
    open_end: bool = False


@dataclass
class Result:
    """What came of a part: an outcome, how long it took, and the end of what it said."""

    name: str
    outcome: str
    took_s: float = 0.0
    tail: str = ""
    open_end: bool = False


@dataclass
class Results:
    """All parts so far, written after each."""

    folder: Path
    found: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add one, and write all."""
        self.found.append(result)
        (self.folder / "results.json").write_text(json.dumps([asdict(one) for one in self.found], indent=1))
        print(f"{result.name}: {result.outcome} ({result.took_s:.0f} s)", flush=True)


class Running:
    """A part under way, in a process group of its own."""

    def __init__(self, part: Part, folder: Path) -> None:
        self.part, self._log = part, folder / f"{part.name}.log"
        self._began_s = time.monotonic()
        beside = str(Path(part.python).absolute().parent)  # its mpiexec
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [part.python, *part.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PATH": f"{beside}:{os.environ.get('PATH', os.defpath)}"},
                start_new_session=True,
            )

    def result(self, until_s: float) -> Result:
        """Wait until it ends, or end it then or at its own limit."""
        cut = False
        try:
            self._process.wait(max(0.0, min(until_s, self._began_s + self.part.most_s) - time.monotonic()))
        except subprocess.TimeoutExpired:
            cut = True
        finally:  # interrupted itself, too
            self.end()
        tail = self._log.read_text(errors="replace")[-_TAIL:]
        code = self._process.returncode
        skipped = code == _NO_TESTS or (code == 0 and " passed" not in tail and " skipped in " in tail)
        outcome = CUT if cut else SKIPPED if skipped else FAILED if code else OK
        return Result(self.part.name, outcome, time.monotonic() - self._began_s, tail, self.part.open_end)

    def end(self) -> None:
        """Interrupt it if it still runs, so that it ends its ranks, and kill what does not listen."""
        if self._process.poll() is not None:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(_GRACE_S)
                break
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()


def run(stages: Sequence[Sequence[Part]], results: Results, seconds: float) -> int:
    """Do all of it; returns 1 if a part failed, or any but the records was cut short."""
    until_s = time.monotonic() + seconds
    for stage in stages:
        there = until_s - time.monotonic() >= _LEAST_S
        running = [Running(part, results.folder) for part in stage if there]
        try:
            for one in running:
                results.add(one.result(until_s))
        finally:
            for one in running:
                one.end()
        for part in stage if not there else ():
            results.add(Result(part.name, NOT_RUN, open_end=part.open_end))
    bad = (one.outcome == FAILED or (one.outcome in (CUT, NOT_RUN) and not one.open_end) for one in results.found)
    return int(any(bad))


def stages(device: str, small: bool, folder: Path, nccl: str, gpus: int) -> list[list[Part]]:
    """Return the parts, most valuable first."""
    sizes = ("--small",) if small else ()

    def measured(name: str, most_s: float, python: str = sys.executable) -> Part:
        out = str(folder / f"measured-{name}.json")
        command = ("-m", "tests.gpu.measure", "--device", device, *sizes, "--parts", name, "--out", out)
        return Part(name, command, most_s, python)

    def tests(*names: str, most_s: float) -> Part:
        files = tuple(f"tests/gpu/test_{name}.py" for name in names)
        return Part("test_" + "-".join(names), ("-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *files), most_s)

    one_gpu = [
        [measured("speed", 45)],
        [measured("sharing", 40)],
        [measured("questions", 70)],
        [measured("limits", 45)],
        [
            tests("one_rank", "runs", most_s=60),
            tests("time", most_s=60),
            tests("sharing", most_s=60),
            tests("panel", most_s=60),
            measured("leaving", 60),
            *([measured("nccl", 60, nccl)] if nccl else []),
        ],
        [tests("full", "doctor", most_s=60)],
    ]
    several = [[measured("several", 60, nccl or sys.executable)]] if gpus > 1 else []
    made = str(folder / "records")
    records = [
        Part(
            f"records-{ranks}",
            ("-m", "tests.gpu.record", "--ranks", str(ranks), "--device", device, "--folder", made, *sizes),
            600,
            open_end=True,
        )
        for ranks in (1, 4)
    ]
    return [*one_gpu[:1], *several, *one_gpu[1:], records[:1], records[1:]]


def slower(all_stages: Sequence[Sequence[Part]], times: float) -> list[list[Part]]:
    """Return the same with so many times as much time for each part."""
    return [[replace(part, most_s=times * part.most_s) for part in stage] for stage in all_stages]


def chosen(all_stages: Sequence[Sequence[Part]], names: Sequence[str]) -> Iterator[list[Part]]:
    """Yield the stages with these parts alone; raise ``SystemExit`` for a name that there is not."""
    known = [part.name for stage in all_stages for part in stage]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"There is no part {unknown[0]}: name some of {', '.join(known)}.")
    for stage in all_stages:
        if some := [part for part in stage if not names or part.name in names]:
            yield some


def visible_gpus() -> int:
    """Return how many GPUs torch sees."""
    import torch

    return torch.cuda.device_count()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=USUAL_SECONDS, help="more give each part more, too")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="sizes as small as they get")
    parser.add_argument("--nccl", default="", help="a Python whose Horovod was built on NCCL")
    parser.add_argument("--parts", default="")
    args = parser.parse_args(arguments)
    # A shell starts what it runs in the background with Ctrl-C ignored, and parts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder: Path = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = slower(
        stages(args.device, args.small, folder, args.nccl, visible_gpus()), max(1.0, args.seconds / USUAL_SECONDS)
    )
    code = run(list(chosen(wanted, list(filter(None, args.parts.split(","))))), Results(folder), args.seconds)
    print(f"All of it: {folder}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
