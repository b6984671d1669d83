"""Measures the examples of docs/time.md again and writes them there: ``python docs/time_examples.py``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import gpumem_nb
from gpumem_nb.report.step_time import TimeReport
from gpumem_nb.session import Session
from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.step_times import PARTS
from gpumem_nb.shared.units import format_bytes, format_rate

PAGE = Path(__file__).with_name("time.md")
START = {"checkpointing": "none", "batch_size": 32, "accumulation_steps": 1, "optimizer": "adamw"}
FLIPS: tuple[dict[str, object], ...] = (
    {},
    {"checkpointing": "blocks"},
    {"batch_size": 8},
    {"accumulation_steps": 2},
    {"optimizer": "sgd"},
)
SLOW = "import time; slow = model.register_forward_pre_hook(lambda *_: time.sleep(0.1))"
STEPS = 30
LARGE = {"width": 256, "depth": 4}
LARGE_START = {"batch_size": 4, "optimizer": "sgd", "learning_rate": 0.1}
SCALED: tuple[tuple[str, dict[str, int]], ...] = (("digits-resnet", {"resolution": 24}), ("text-gpt", {}))
SLOWED: dict[str, object] = {"bucket_mib": 32, "cycle_time_ms": 20}
SCALINGS, SCALING_STEPS = 3, 40
COMMUNICATION: tuple[dict[str, object], ...] = (
    {},
    {"compression": "fp16"},
    {"reduction": "sum"},
    {"reduction": "adasum"},
    {"bucket_mib": 1},
    {"bucket_mib": 32},
    {"fusion_threshold_mib": 2},
    {"cycle_time_ms": 10},
    {"cache_capacity": 0},
)


def row(name: str, report: TimeReport) -> str:
    """One change."""
    count = len(report.ranks)
    step_s = sum(one.step_s for one in report.ranks) / count
    parts = [sum(one.times[part] for one in report.ranks) / count for part in PARTS]
    cells = [f"{1000 * seconds:.1f}" for seconds in (step_s, *parts)]
    straggler = f"rank {report.straggler.rank}" if report.straggler else ""
    return f"| {' | '.join([name, *cells, f'{100 * report.waiting:.0f} %', straggler])} |"


def measure(session: Session, flip: dict[str, object]) -> TimeReport:
    """Some steps under these settings."""
    session.set(**(START | flip))
    session.train(STEPS)
    return session.time()


def travelled(session: Session, flip: dict[str, object]) -> str:
    """What one knob of communication does: a flip there, some steps, and back again."""
    began_s = time.perf_counter()
    session.set(**flip)
    took_s = time.perf_counter() - began_s
    frame = session.train(STEPS).frame()
    now = session.history.now()
    assert now
    cells = [
        f"{1000 * took_s:.0f}" if flip else "",
        format_bytes(int(frame.communication_bytes.max())),
        format_bytes(int(frame.live_peak_bytes.median())),  # Horovod's thread may let go of gradients late
        format_rate(now.samples_per_s),
        "n/a" if now.hidden_share is None else f"{100 * now.hidden_share:.0f} %",
        "" if now.compression_error is None else f"{100 * now.compression_error:.2g} %",
    ]
    session.set(**{name: KNOBS[name].default for name in flip})
    return f"| {' | '.join([named(flip), *cells])} |"


def communication(session: Session) -> list[str]:
    """The table of the knobs of communication."""
    session.load("text-gpt", **LARGE)
    session.set(**LARGE_START)
    headings = ("", "flip, ms", "communication", "live peak", "samples/s", "hidden", "error")
    lines = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}"]
    return [*lines, *(travelled(session, flip) for flip in COMMUNICATION)]


def scaling(session: Session) -> list[str]:
    """Samples/s on 1, 2 and 4 ranks, and what 1 and 2 let expect of 4; each a few times."""
    headings = ("", "1 rank", "2 ranks", "4 ranks", "lost on 4 ranks to", "4, from 1 and 2", "off by")
    lines = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}"]
    for name, knobs in SCALED:
        session.load(name, **knobs)
        session.train(4)
        for _ in range(SCALINGS):
            expected, _ = session.scaling([1, 2], SCALING_STEPS).forecast(4)
            report = session.scaling([1, 2, 4], SCALING_STEPS)
            *_, last = report.measured
            rates = [format_rate(one.samples_per_s) for one in report.measured]
            lost = ", ".join(f"{what} {100 * share:.0f} %" for what, share in report.lost(last).items())
            off = expected / last.samples_per_s - 1
            words = f"`{name}{''.join(f' {knob}={value}' for knob, value in knobs.items())}`"
            lines.append(f"| {' | '.join([words, *rates, lost, format_rate(expected), f'{100 * off:+.0f} %'])} |")
    return lines


def autotuned(session: Session) -> list[str]:
    """What autotune says, of the settings as they come and of some that are slow."""
    lines = []
    for flip in ({}, SLOWED):
        session.load("text-gpt", **LARGE)
        session.set(**LARGE_START, **flip)
        session.train(STEPS)
        session.set(autotune="on")
        notes: list[str] = []
        while session.policy.autotune:
            notes += session.train(STEPS).notes
        lines.append(f"- From {named(flip)}: {notes[-1]}")
    return lines


def named(flip: dict[str, object]) -> str:
    """What was changed."""
    return ", ".join(f"`{knob}={value}`" for knob, value in flip.items()) or "as it comes"


def write(place: str, lines: list[str]) -> None:
    """Put a table between its marks."""
    before, _, rest = PAGE.read_text().partition(f"<!-- {place} -->\n")
    after = rest.partition("<!-- end -->")[2]
    PAGE.write_text("\n".join([f"{before}<!-- {place} -->", *lines, f"<!-- end -->{after}"]))
    print("\n".join(lines))


def times(session: Session) -> list[str]:
    """The table of the parts of a step."""
    headings = ("", "step", *PARTS, "waiting", "waited for")
    lines = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 2)}---|"]
    session.load("text-gpt")
    for flip in FLIPS:
        lines.append(row(named(flip), measure(session, flip)))
    session.run(SLOW, ranks=[1])
    return [*lines, row("rank 1 sleeps 100 ms in each forward", measure(session, {}))]


EXAMPLES = {
    "measured scaling": (4, scaling),
    "measured": (2, times),
    "measured communication": (2, communication),
    "measured autotune": (2, autotuned),
}


def main() -> None:
    """Measure and write all of them, or those that are named."""
    for place in sys.argv[1:] or EXAMPLES:
        ranks, measured = EXAMPLES[place]
        with gpumem_nb.start(ranks, device="cpu") as session:
            write(place, measured(session))


if __name__ == "__main__":
    main()
