"""Measures the example of docs/time.md again and writes it there: ``python docs/time_examples.py``."""

from __future__ import annotations

from pathlib import Path

import gpumem_nb
from gpumem_nb.report.step_time import TimeReport
from gpumem_nb.session import Session
from gpumem_nb.shared.step_times import PARTS

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


def main() -> None:
    """Measure and write."""
    headings = ("", "step", *PARTS, "waiting", "waited for")
    lines = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 2)}---|"]
    with gpumem_nb.start(2, device="cpu") as session:
        session.load("text-gpt")
        for flip in FLIPS:
            name = ", ".join(f"`{knob}={value}`" for knob, value in flip.items()) or "as it comes"
            lines.append(row(name, measure(session, flip)))
        session.run(SLOW, ranks=[1])
        lines.append(row("rank 1 sleeps 100 ms in each forward", measure(session, {})))
    before, _, rest = PAGE.read_text().partition("<!-- measured -->\n")
    after = rest.partition("<!-- end -->")[2]
    PAGE.write_text("\n".join([f"{before}<!-- measured -->", *lines, f"<!-- end -->{after}"]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
