"""Predictions without a GPU against published peaks of nvidia-smi, and against jobs measured on an H200.

``python -m tests.bench.cold`` writes docs/prediction-cold.md and its plot; ``--folder`` names one with other rows of
the same form.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gpumem_nb
from gpumem_nb import Workload
from gpumem_nb.planning import dry_process
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, Prediction
from gpumem_nb.shared.answers import Progress
from gpumem_nb.shared.forecast import DryAnswer, DryRun
from tests.bench import plot
from tests.published import h200
from tests.published import rows as published

REPORT = Path(__file__).parents[2] / "docs" / "prediction-cold.md"
MARKER = "<!-- the rest is written by python -m tests.bench.cold -->\n"
GPU = "A100-40GB"
CENSORED_MIB = 38_000
WANTED_WITHIN = 0.08
H200 = "h200"
NAMES = {
    "transformers": "transformers, A100",
    "cnns": "convolutional networks, A100",
    H200: "all kinds, H200",
}
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One row: what was predicted of it, and what was measured."""

    name: str
    measured_mib: float
    died: bool
    predicted: Prediction
    peak_rss_bytes: int

    @property
    def predicted_mib(self) -> float:
        return (self.predicted.device_bytes or 0) / MIB

    @property
    def counts(self) -> bool:
        """Whether the figure is what the job wanted, and not what the card had."""
        return not self.died and self.measured_mib < CENSORED_MIB

    @property
    def error(self) -> float:
        """As a share of what was measured; above 0 where too much was predicted."""
        return self.predicted_mib / self.measured_mib - 1

    @property
    def bar_mib(self) -> tuple[float, float]:
        """Between what the device's memory was said to lie."""
        beside = self.predicted_mib - self.predicted.reserved_peak_bytes / MIB
        return self.predicted.low_bytes / MIB + beside, self.predicted.high_bytes / MIB + beside

    @property
    def covered(self) -> bool:
        """Whether the measured value lies within the error bar."""
        low, high = self.bar_mib
        return low <= self.measured_mib <= high


def main() -> int:
    """Predict all rows and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=published.FOLDER, help="where transformers.csv, cnns.csv and h200.csv lie"
    )
    args = parser.parse_args()
    cases: dict[str, list[Case]] = {}
    for table in (name for name in NAMES if (args.folder / f"{name}.csv").exists()):
        cases[table] = []
        for row in published.rows(table, args.folder):
            case = on_h200(row) if table == H200 else on_a100(row)
            cases[table].append(case)
            print(line(case), flush=True)
    text = report(cases)
    print(text)
    if args.folder == published.FOLDER:
        drawn = plot.draw("prediction-cold", [comparison(table, of_table) for table, of_table in cases.items()])
        REPORT.write_text(REPORT.read_text().partition(MARKER)[0] + MARKER + text + drawn)
    return 0


def on_a100(row: published.Row) -> Case:
    """A published row."""
    predicted, rss = measured(published.workload(row), GPU, {"batch_size": int(row["batch_size"])})
    name, died = row["row_id"].removeprefix("gpumemnet_"), row["status"] != "SUCCESSFUL"
    return Case(name, int(row["max_gpu_memory_mib"]), died, predicted, rss)


def on_h200(row: h200.Row) -> Case:
    """A row of this project's own, of which the process's bytes were measured."""
    predicted, rss = measured(h200.workload(row), h200.GPU, h200.knobs(row))
    name = " ".join((row["id"], row["model"], row["precision"], row["checkpointing"]))
    return Case(name, float(row["process_mib"]), False, predicted, rss)


def measured(workload: Workload, gpu: str, knobs: dict[str, Any]) -> tuple[Prediction, int]:
    """Predict one row, and tell how much memory that took."""
    peaks: list[int] = []
    own = dry_process.ask

    def ask(question: DryRun, progress: Progress) -> DryAnswer:
        answer = own(question, progress)
        peaks.append(answer.peak_rss_bytes)
        return answer

    with mock.patch.object(dry_process, "ask", ask):
        predicted = gpumem_nb.predict(workload, gpu=gpu, **knobs)
    assert isinstance(predicted, Prediction)
    return predicted, peaks[0]


def line(case: Case) -> str:
    """A row of the table."""
    bar = f"{case.predicted.low_bytes / MIB:.0f} to {case.predicted.high_bytes / MIB:.0f}"
    error = f"{100 * case.error:+.1f} %" if case.counts else "died" if case.died else "censored"
    return (
        f"| {case.name} | {case.measured_mib:,.0f} | {case.predicted_mib:,.0f} | "
        f"{error} | {bar} | {case.predicted.verdict} | {case.predicted.seconds:.1f} |"
    )


def comparison(table: str, cases: Sequence[Case]) -> plot.Comparison:
    """A plot of the rows that count, with their error bars."""
    points = [plot.Point(case.measured_mib, case.predicted_mib, *case.bar_mib) for case in cases if case.counts]
    return plot.Comparison(NAMES[table], "MiB of the device", WANTED_WITHIN, {NAMES[table]: points})


def report(cases: dict[str, list[Case]]) -> str:
    """The figures as Markdown."""
    versions = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    versions += f", transformers {importlib.metadata.version('transformers')}"
    parts = [f"Predicted on a CPU with {versions}. Measured again by `python -m tests.bench.cold`.\n"]
    for table, of_table in cases.items():
        parts.append(f"\n## {NAMES[table][0].upper() + NAMES[table][1:]}\n\n{summary(of_table)}\n")
        parts.append("| row | measured MiB | predicted MiB | error | 95 % of reserved MiB | verdict | s |")
        parts.append("|---|---|---|---|---|---|---|")
        parts += map(line, of_table)
    return "\n".join(parts) + "\n"


def summary(cases: Sequence[Case]) -> str:
    """Median and 95th percentile of errors, wrong verdicts, time and memory."""
    errors = sorted(abs(case.error) for case in cases if case.counts)
    p95 = errors[min(len(errors) - 1, round(0.95 * (len(errors) - 1)))]
    wrong = sum(case.died and case.predicted.verdict == FITS for case in cases)
    refused = sum(not case.died and case.predicted.verdict == DOES_NOT_FIT for case in cases)
    covered = sum(case.covered for case in cases if case.counts)
    seconds = [case.predicted.seconds for case in cases]
    return (
        f"{len(errors)} rows: median error {100 * statistics.median(errors):.1f} %, 95th percentile {100 * p95:.1f} %, "
        f'largest {100 * errors[-1]:.1f} %. {covered} within their error bar. Wrong "fits": {wrong} of {len(cases)}; '
        f'wrong "does not fit": {refused}. {statistics.median(seconds):.1f} s a row (largest {max(seconds):.1f} s), '
        f"at most {max(case.peak_rss_bytes for case in cases) / MIB:,.0f} MiB of memory of the process that predicts.\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
