"""What ``precision=bf16_weights`` costs: digits of the weights, time of the update, and gradients that travel in fp32.

``python -m tests.bench.narrow`` writes its part of docs/ladder.md; ``--quick`` takes few steps, and prints.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.units import format_bytes

REPORT = Path(__file__).parents[2] / "docs" / "ladder.md"
BEGIN = "<!-- this table is written by python -m tests.bench.narrow -->\n"
END = "<!-- end of what weights in bf16 cost -->\n"
WORKLOADS: dict[str, dict[str, Any]] = {
    "digits-resnet": {},
    "text-gpt": {"width": 64, "depth": 2, "heads": 2, "sequence_length": 32},
}
NEAREST = """
import gpumem_nb.engine.step.pieces as pieces
pieces.stochastic = pieces.round_into
pieces.round_into = lambda weight, wide, seed: weight.copy_(wide)
"""
STOCHASTIC = "pieces.round_into = pieces.stochastic"
KEEP = "first = [weight.detach().clone() for weight in model.parameters()]"
COMPARE = (
    "final = [weight.detach().float().clone() for weight in model.parameters()]\nif '{how}' == 'fp32': exact = final"
)
DISTANCE = (
    "(sum((a - b).square().sum() for a, b in zip(final, exact)) / "
    "sum((b - c).square().sum() for b, c in zip(exact, first))).sqrt().item()"
)
LAST, TURNS = 20, 3  # losses that are averaged, and turns that are taken


def main() -> int:
    """Measure all and write the part of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps, and no page")
    args = parser.parse_args()
    steps = 40 if args.quick else 160
    with gpumem_nb.start(1, device="cpu", threads=1) as session:
        rows = [row for name in WORKLOADS for row in digits(session, name, steps)]
    with gpumem_nb.start(2, device="cpu", threads=1) as session:
        travel = list(travels(session, 2 if args.quick else 6))
    text = "\n".join(
        [
            f"{time.strftime('%d %B %Y')}, torch {importlib.metadata.version('torch')}, Python "
            f"{platform.python_version()}, virtual GPU. One rank, {steps} steps of AdamW with a learning rate of "
            f"1e-4: the mean of the last {LAST} losses, and how far the weights are from those in fp32, in lengths of "
            "the way that these went.",
            "",
            "| workload | precision | loss | off | distance |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
            "Two ranks on two busy cores, `text-gpt` of width 256 and depth 4, in turns: a step, what of it ranks wait "
            "for gradients, and its update.",
            "",
            "| precision | live peak | of it communication | a step | waiting | update |",
            "| --- | --- | --- | --- | --- | --- |",
            *travel,
            "",
        ]
    )
    print(text)
    if not args.quick:
        before, rest = REPORT.read_text().split(BEGIN)
        REPORT.write_text(before + BEGIN + text + END + rest.partition(END)[2])
    return 0


def digits(session: Session, name: str, steps: int) -> Iterator[str]:
    """Train the same steps in each way."""
    exact = 0.0
    for how in ("fp32", "bf16", "bf16_weights", "bf16_weights, rounded to nearest"):
        session.load(name, **WORKLOADS[name])
        session.run(KEEP)
        session.set(precision=how.partition(",")[0], learning_rate=1e-4, optimizer="adamw")
        session.run(NEAREST if "nearest" in how else "pass")
        frame = session.train(steps).frame()
        session.run(COMPARE.format(how=how))
        session.run(STOCHASTIC if "nearest" in how else "pass")
        loss = float(frame.loss.tail(LAST).mean())
        exact = exact or loss
        away = float(session.run(DISTANCE)[0])
        off = f"{100 * (loss / exact - 1):+.2f} %".replace("-", "−")
        row = f"| {name} | {how} | {loss:.4f} | {off} | {away:.3f} |"
        print(row, flush=True)
        yield row


def travels(session: Session, steps: int) -> Iterator[str]:
    """Train with gradients that travel as they are, and with those that are widened."""
    session.load("text-gpt", width=256, depth=4, heads=4, sequence_length=64)
    session.set(batch_size=4, optimizer="adamw")
    precisions = ("fp32", "bf16", "bf16_weights")
    frames: dict[str, list[Any]] = {precision: [] for precision in precisions}
    for precision in precisions * TURNS:
        session.set(precision=precision)
        session.train(2)
        frames[precision].append(session.train(steps).frame())
    for precision, taken in frames.items():
        report = session.predict(precision=precision)
        figures = [
            precision,
            format_bytes(report.live_peak_bytes),
            format_bytes(report.categories.get("communication", 0)),
            *(
                f"{1000 * statistics.median(frame[name].median() for frame in taken):.0f} ms"
                for name in ("step_s", "reduction_s", "update_s")
            ),
        ]
        print(" | ".join(figures), flush=True)
        yield f"| {' | '.join(figures)} |"


if __name__ == "__main__":
    raise SystemExit(main())
