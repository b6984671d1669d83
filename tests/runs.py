"""Runs made by hand, for tests of what is shown and kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from gpumem_nb.kernel.history import History
from gpumem_nb.kernel.record import Record
from gpumem_nb.report.runs import Runs
from gpumem_nb.report.runs.columns import SCROLLED
from gpumem_nb.shared.messages import Ledger
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.step_times import BACKWARD, FORWARD, REDUCTION, StepTimes
from tests.ledgers import MIB, info, reading, sample

LIMITS = (96 * MIB, 80 * MIB)  # of two ranks


def history_of() -> History:
    """Of two ranks."""
    history = History(2)
    history.mark("load", "mine")
    return history


def train(
    history: History,
    settings: Settings,
    losses: Sequence[float | None],
    workload: str = "mine",
    rates: Sequence[float] = (320.0,),
    peak: int = 40 * MIB,
    recorded: Ledger | None = None,
    backward_s: float = 0.05,
    **model: Any,
) -> None:
    """A configuration of its own with a step for each loss; rank 1 needs 4 MiB more, and waits.

    ``model``: its options and parameters.
    """
    settings_id = len(history.tried) + 1
    history.begin(settings_id, workload, settings, **model)
    for number, loss in enumerate(losses):
        of_ranks = []
        for rank in range(2):
            times = StepTimes.of({FORWARD: 0.02, BACKWARD: backward_s, REDUCTION: 0.01 * rank}, 0.0)
            bytes_ = {"live_peak_bytes": peak + 4 * MIB * rank, "reserved_peak_bytes": peak + 8 * MIB * rank}
            figures: dict[str, Any] = {"samples_per_s": rates[number % len(rates)], "loss": loss, "times": times}
            step = sample(history.steps + 1, rank, recorded, settings_id=settings_id, **bytes_, **figures)
            of_ranks.append(step)
        history.add(of_ranks, [reading(limit=limit) for limit in LIMITS])


def runs_of(*histories: History) -> tuple[Record, Runs]:
    """The record of sessions' ranks, each after the one before it was restarted, and what it shows."""
    record = Record()
    for history in histories:
        record.follow(history, info())
    return record, shown(record)


def shown(record: Record) -> Runs:
    """As a session does."""
    return Runs(record.rows(), record.note)


def table(runs: Runs) -> list[list[str]]:
    """The headings and the rows of what a notebook shows."""
    html = ElementTree.fromstring(runs._repr_html_().split("<script>")[0].removeprefix(SCROLLED))
    return [["".join(cell.itertext()).replace("\u00a0", " ") for cell in row] for row in html.iter("tr")]


def cells(runs: Runs, heading: str) -> list[str]:
    """What stands below a heading."""
    headings, *rows = table(runs)
    return [row[headings.index(heading)] for row in rows]
