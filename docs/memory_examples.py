"""Measures the example of docs/memory.md again and writes it there: ``python docs/memory_examples.py``."""

from __future__ import annotations

from pathlib import Path

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.categories import CATEGORIES
from gpumem_nb.shared.messages import Ledger
from gpumem_nb.shared.units import format_bytes

PAGE = Path(__file__).with_name("memory.md")
FLIPS: tuple[dict[str, object], ...] = (
    {},
    {"precision": "bf16"},
    {"checkpointing": "blocks"},
    {"batch_size": 8},
    {"accumulation_steps": 2},
    {"optimizer": "sgd"},
)
# A convolution's gradients are computed inside operators.
OTHER = "digits-resnet"
START = {"precision": "fp32", "checkpointing": "none", "batch_size": 32, "accumulation_steps": 1, "optimizer": "adamw"}


def measure(session: Session, flip: dict[str, object]) -> Ledger:
    """Rank 0's ledger of the second step or a later one under these settings."""
    session.set(**(START | flip))
    session.train(4)
    return [sample.ledger for sample in session.history.samples()[0] if sample.ledger][-1]


def table(ledgers: list[tuple[str, Ledger]]) -> str:
    """One row a category, one column a setting, in MiB at the peak."""
    lines = ["| at the peak | " + " | ".join(name for name, _ in ledgers) + " |", "|---|" + "---:|" * len(ledgers)]
    for category in CATEGORIES:
        cells = [format_bytes(ledger.at_peak.get(category, 0)) for _, ledger in ledgers]
        lines.append(f"| {category} | " + " | ".join(cells) + " |")
    lines.append(
        "| **live peak** | " + " | ".join(f"**{format_bytes(ledger.peak_bytes)}**" for _, ledger in ledgers) + " |"
    )
    places = [f"{ledger.phase} {ledger.module}".strip() for _, ledger in ledgers]
    return "\n".join([*lines, "| where | " + " | ".join(places) + " |"])


def main() -> None:
    """Measure and write."""
    with gpumem_nb.start(2, device="cpu") as session:
        session.load("text-gpt")
        ledgers = [
            (", ".join(f"{name}={value}" for name, value in flip.items()) or "as loaded", measure(session, flip))
            for flip in FLIPS
        ]
        session.load(OTHER)
        ledgers.append((OTHER, measure(session, {})))
    before, _, rest = PAGE.read_text().partition("<!-- measured -->\n")
    after = rest.partition("<!-- end -->")[2]
    PAGE.write_text(f"{before}<!-- measured -->\n{table(ledgers)}\n<!-- end -->{after}")
    print(table(ledgers))


if __name__ == "__main__":
    main()
