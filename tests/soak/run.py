"""``make soak``: every fault in every situation once, then random flips and faults for half an hour on four ranks.

Measures what was lost, how long people wait for a message, and whether memory stays flat in the kernel and on the
ranks; writes docs/reliability.md. Ends with an error as soon as something is not as it must be.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from gpumem_nb.session import Session
from gpumem_nb.shared.processes import cores
from gpumem_nb.shared.units import format_bytes
from tests.cluster import faults, trouble
from tests.cluster.faults import FAULTS, Fault
from tests.conftest import ranks
from tests.soak.timeline import Timeline

REPORT = Path(__file__).parents[2] / "docs" / "reliability.md"
MARKER = "<!-- the rest is written by make soak -->\n"
SITUATIONS = ("foreground", "background", "flip", "cell")
MEASURE_EVERY_S = 30.0
# Two seconds, as in the tests, would tell of what else the machine does while four ranks share two cores.
STALL_LIMIT_S = 6.0
# How often each thing happens: restarts take seconds and give the ranks new memory, so they are rare.
WEIGHTS = {"survived": 4, "stops": 6, "dies": 0.15}
FLIPS_EACH = 5
LATE_GROWTH = 0.05  # of memory at rest, that the second half may add; the first minutes fill what is kept for good
FEWEST_READINGS = 20  # that can tell: ten minutes
STAND_INS = (
    "What stands in for what: a full disk is a limit on the size of files (EFBIG, not ENOSPC); the truncated snapshot",
    "is a saved state, cut off and given to resume; an interrupt in the foreground or during a cell is the signal of",
    "the stop button, in the background and during a flip it is `session.interrupt()`.",
)


@dataclass
class Tally:
    """What was injected and what came of it."""

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lost: Counter[str] = field(default_factory=Counter)
    minutes: float = 0.0
    flips: int = 0
    steps: int = 0
    kernel: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    resident: list[list[int]] = field(default_factory=list)


def main() -> int:
    """Run both parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-report", action="store_true", help="print only, leave docs/reliability.md alone")
    args = parser.parse_args()
    cells = {(fault.name, situation): cell(fault, situation) for fault in FAULTS for situation in SITUATIONS}
    timeline = Timeline()
    try:
        for tally in soak(args.minutes, random.Random(args.seed), timeline):
            # Written again and again: whoever ends it early has the figures up to then.
            text = report(cells, tally, args.seed)
            if not args.no_report:
                REPORT.write_text(REPORT.read_text().partition(MARKER)[0] + MARKER + text)
    except Exception:
        print(f"What the ranks did before it failed:\n{timeline}", flush=True)
        raise
    print(text)
    check_flat(tally)
    return 0


def cell(fault: Fault, situation: str) -> float:
    """One cell of the matrix on two ranks; the seconds until a message."""
    took_s, _ = inject(trouble.prepared(ranks(2)), fault, situation, faults.STALL_LIMIT_S)
    print(f"{fault.name}, {situation}: {took_s:.2f} s", flush=True)
    return took_s


def inject(session: Session, fault: Fault, situation: str, stall_limit_s: float) -> tuple[float, int]:
    """Strike, check everything, and return the seconds until a message and the steps lost."""
    session.set(stall_limit_s=stall_limit_s, snapshot_steps=50)
    session.train(60)
    incident, lost = faults.endure(session, fault, situation)
    return incident.took_s, lost


def soak(minutes: float, dice: random.Random, timeline: Timeline) -> Iterator[Tally]:
    """Random flips and faults on four ranks; what was counted up to each measurement."""
    tally, kernel = Tally(), psutil.Process()
    session = trouble.prepared(ranks(4))
    timeline.watch(session)
    tally.resident.append([])
    began_s, measured_s = time.monotonic(), 0.0
    deadline = began_s + 60 * minutes
    while time.monotonic() < deadline:
        for _ in range(FLIPS_EACH):
            session.set(**random_settings(dice))
            tally.steps += session.train(dice.randint(1, 20)).steps
            tally.flips += 1
        fault = dice.choices(FAULTS, [WEIGHTS[fault.ends] for fault in FAULTS])[0]
        situation = dice.choice(SITUATIONS)
        print(f"{fault.name}, {situation}", flush=True)  # should it end here, this is what it ended on
        took_s, lost = inject(session, fault.at_a_random_moment(dice), situation, STALL_LIMIT_S)
        tally.times[fault.name].append(took_s)
        tally.lost[fault.name] += lost
        if fault.ends == "dies":
            session = trouble.prepared(session)
            timeline.watch(session)
            tally.resident.append([])
        if time.monotonic() - measured_s > MEASURE_EVERY_S:
            measured_s = time.monotonic()
            session = trouble.prepared(session)
            session.train(2)
            tally.kernel.append(kernel.memory_info().rss)
            tally.live.append(max(live for _, live in trouble.everything(session)))
            tally.resident[-1].append(max(psutil.Process(info.pid).memory_info().rss for info in session.ranks))
            left_min = (deadline - time.monotonic()) / 60
            print(f"{left_min:.0f} min left, {sum(map(len, tally.times.values()))} faults, {tally.flips} flips, "
                  f"kernel {format_bytes(tally.kernel[-1])}, rank {format_bytes(tally.resident[-1][-1])}, "
                  f"live {format_bytes(tally.live[-1])}", flush=True)  # fmt: skip
            tally.minutes = (time.monotonic() - began_s) / 60
            yield tally
    session.stop()


def check_flat(tally: Tally) -> None:
    """Raise for memory at rest that still grows in the second half of a long run."""
    longest = max(tally.resident, key=len)
    for what, values in (("kernel", tally.kernel), ("live", tally.live), ("resident", longest)):
        half = len(values) // 2
        if len(values) >= FEWEST_READINGS and _grown(values, half) > LATE_GROWTH * values[-1 - half]:
            raise AssertionError(f"memory grows ({what}): {[format_bytes(value) for value in values]}")


def random_settings(dice: random.Random) -> dict[str, object]:
    """Any settings that the workload can be trained under."""
    return {
        "precision": dice.choice(["fp32", "bf16"]),
        "checkpointing": dice.choice(["none", "selective", "blocks", "sqrt"]),
        "batch_size": dice.choice([2, 4, 8]),
        "accumulation_steps": dice.choice([1, 2]),
        "optimizer": dice.choice(["sgd", "momentum", "adam", "adamw", "adafactor", "own"]),
        "learning_rate": dice.choice([0.001, 0.01]),
        "clip_norm": dice.choice([None, 1.0]),
    }


def report(cells: dict[tuple[str, str], float], tally: Tally, seed: int) -> str:
    """Return docs/reliability.md below the marker."""
    matrix = [
        f"| {fault.name} | " + " | ".join(f"{cells[fault.name, situation]:.2f}" for situation in SITUATIONS)
        + f" | {fault.within_s:g} |"
        for fault in FAULTS
    ]  # fmt: skip
    rows = [
        f"| {name} | {len(times)} | {statistics.median(times):.2f} | {max(times):.2f} | {tally.lost[name]} |"
        for name, times in sorted(tally.times.items())
    ]
    longest = max(tally.resident, key=len)
    return "\n".join(
        [
            "## Each fault in each situation: seconds until a message",
            "",
            "Two ranks, stall limit 2 s; the last column is what the tests allow.",
            *STAND_INS,
            "",
            "| fault | training in the foreground | in the background, panel open | during a flip | during a cell "
            "| allowed |",
            "|---|---|---|---|---|---|",
            *matrix,
            "",
            f"## {tally.minutes:.0f} minutes of random flips and faults on four ranks",
            "",
            f"{tally.flips} flips of several knobs at once, {sum(map(len, tally.times.values()))} faults, seed {seed}, "
            f"stall limit {STALL_LIMIT_S:g} s. Steps lost are those",
            "that ranks had done and were without afterwards: after deaths, those since the last automatic snapshot",
            "(every 50 steps here).",
            "",
            "| fault | injected | median s to a message | longest | steps lost, all together |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Memory at rest, measured every half minute:",
            "",
            "| what | first | last | highest |",
            "|---|---|---|---|",
            _memory("kernel, resident", tally.kernel),
            _memory("rank with most, live bytes", tally.live),
            _memory(f"rank with most, resident (longest life between restarts, {len(longest)} readings)", longest),
            "",
            f"The kernel grew from {format_bytes(tally.kernel[0])} to {format_bytes(tally.kernel[-1])} and flattened:",
            f"by {format_bytes(_grown(tally.kernel, len(tally.kernel) // 2))} in the second half,",
            f"by {format_bytes(_grown(tally.kernel, round(240 / MEASURE_EVERY_S)))} in the last four minutes.",
            "`make soak` fails when a row of this table grows by more than "
            f"{100 * LATE_GROWTH:.0f} % in the second half.",
            "",
            f"Measured on {time.strftime('%Y-%m-%d')}: {cores()} cores, {platform.system()}, Python "
            f"{platform.python_version()}. Measure again: `make soak`",
            "",
        ]
    )


def _memory(what: str, values: list[int]) -> str:
    return f"| {what} | {format_bytes(values[0])} | {format_bytes(values[-1])} | {format_bytes(max(values))} |"


def _grown(values: list[int], readings: int) -> int:
    """By how much over the last readings, or over all if there are fewer."""
    return values[-1] - values[max(0, len(values) - 1 - readings)]


if __name__ == "__main__":
    sys.exit(main())
