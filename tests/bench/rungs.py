"""What each rung of the memory ladder frees and costs, and how exactly it and pairs of rungs are predicted.

``python -m tests.bench.rungs`` writes the end of docs/ladder.md; ``--quick`` measures a tenth of the pairs, and prints.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpumem_nb
from gpumem_nb.kernel.compatibility import usable
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, Prediction
from gpumem_nb.session import Session
from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.units import format_bytes
from tests.bench.figures import Figure
from tests.bench.prediction import EMPTY, LIMIT_MIB, Case, loaded, measure

REPORT = Path(__file__).parents[2] / "docs" / "ladder.md"
MARKER = "<!-- the rest is written by python -m tests.bench.rungs -->\n"
RUNGS: dict[str, dict[str, Any]] = {
    "loss_head=chunked": {"loss_head": "chunked"},
    "checkpointing=selective": {"checkpointing": "selective"},
    "checkpointing=blocks": {"checkpointing": "blocks"},
    "precision=bf16": {"precision": "bf16"},
    "precision=bf16_weights": {"precision": "bf16_weights"},
    "batch_size=4 accumulation_steps=2": {"batch_size": 4, "accumulation_steps": 2},
    "optimizer=adamw8bit": {"optimizer": "adamw8bit"},
    "optimizer=muon": {"optimizer": "muon"},
    "optimizer=adafactor": {"optimizer": "adafactor"},
    "offload_activations=on": {"offload_activations": "on"},
    "offload_optimizer=on": {"offload_optimizer": "on"},
}
COMPILED: dict[str, dict[str, Any]] = {"compile=blocks": {"compile": "blocks"}}
"""Not among the pairs: each compiles for up to a minute."""
SHARED: dict[str, dict[str, Any]] = {
    "shard_optimizer=on": {"shard_optimizer": "on"},
    "shard_gradients=on": {"shard_optimizer": "on", "shard_gradients": "on", "bucket_mib": 1},
}
"""Of two ranks."""
PLAIN = {knob: KNOBS[knob].default for change in (RUNGS | COMPILED | SHARED).values() for knob in change} | {
    "batch_size": 8
}
PUBLISHED = {
    "precision=bf16_weights": "accuracy −0.1 to +0.2 % of that in 32 bits (Zamirai et al. 2021, arXiv 2010.06192)",
    "loss_head=chunked": "30.25 → 2.14 GB for the loss alone, at 1.87 × its time (huggingface/trl#5575)",
    "checkpointing=blocks": "memory of √n layers, at one more forward (Chen et al. 2016, arXiv 1604.06174)",
    "optimizer=adamw8bit": "52 → 39 GB of a model's training (pytorch/ao#746, another 8-bit AdamW)",
    "optimizer=muon": "one number for each of a matrix, for AdamW's two (Liu et al. 2025, arXiv 2502.16982)",
    "offload_activations=on": "0 and +35 % time at short lengths, −25 % at 10⁶ tokens (huggingface/accelerate#4175)",
    "shard_optimizer=on": "47.2 → 33.8 GB of a model's training (huggingface/nanotron#261)",
    "optimizer=adafactor": "a row and a column for each matrix (Shazeer and Stern 2018, arXiv 1804.04235)",
}
ROUNDS, STEPS = 3, 3
# 40 MB of weights; a step of 8 sequences needs about 300 MiB.
GPT = """
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
net = GPT2LMHeadModel(GPT2Config(vocab_size=20000, n_positions=64, n_embd=256, n_layer=6, n_head=4, use_cache=False))
ids = torch.randint(0, 20000, (256, 64))
data = [{"input_ids": row, "labels": row} for row in ids]
"""


def main() -> int:
    """Measure all and write the end of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the pairs, and no page")
    args = parser.parse_args()
    described, rungs = on_two_ranks()
    rows = [rung.row for rung in rungs]
    with ranks(1) as session:
        described, rungs = alone(session, RUNGS | COMPILED)
        rows = [*(rung.row for rung in rungs), *rows]
        cases = [case for name in loaded(session) for case in pairs(session, name, args.quick)]
    text = report(described, rows, cases)
    print(text)
    if not args.quick:
        REPORT.write_text(REPORT.read_text().partition(MARKER)[0] + MARKER + text)
    return 0


def figures() -> list[Figure]:
    """Return each rung's ratios for ``make bench``."""
    with ranks(1) as session:
        described, rungs = alone(session, RUNGS | COMPILED)
    return [figure for rung in (*rungs, *on_two_ranks()[1]) for figure in rung.figures(described)]


def ranks(count: int) -> Session:
    """Start so many ranks with one thread each."""
    return gpumem_nb.start(count, device="cpu", memory_limit=f"{LIMIT_MIB}MiB", threads=1)


def on_two_ranks() -> tuple[str, list[Rung]]:
    """Measure what ranks share."""
    with ranks(2) as session:
        return alone(session, SHARED)


@dataclass(frozen=True)
class Rung:
    """One rung alone, against the plain step.

    Attributes:
        before, after: live peak without and with it, in bytes.
        predicted: what was predicted of the peak with it, in bytes.
        ratios: time of a step with it ÷ without, of each round, in which the two took turns.
    """

    name: str
    before: int
    after: int
    predicted: int
    ratios: list[float]

    @property
    def row(self) -> str:
        """Its line of docs/ladder.md."""
        columns = [
            f"`{self.name}`",
            f"{format_bytes(self.before)} → {format_bytes(self.after)}",
            f"−{100 * (1 - self.after / self.before):.0f} %",
            f"{100 * (self.predicted / self.after - 1):+.2f} %".replace("-", "−"),
            f"{statistics.median(self.ratios):.2f} [{min(self.ratios):.2f}, {max(self.ratios):.2f}]",
            PUBLISHED.get(self.name.partition(",")[0], ""),
        ]
        return f"| {' | '.join(columns)} |"

    def figures(self, described: str) -> list[Figure]:
        """Its ratios; no target is set for what it costs."""
        sizes = f"{format_bytes(self.before)} → {format_bytes(self.after)}, {described}"
        return [
            Figure(f"{self.name}: live peak ÷ without", "≤ 1", values=[self.after / self.before], details=sizes),
            Figure(f"{self.name}: step time ÷ without", "", values=self.ratios),
        ]


def alone(session: Session, rungs: dict[str, dict[str, Any]]) -> tuple[str, list[Rung]]:
    """Measure each rung by itself on one model; also return what that is."""
    session.run(GPT)
    session.attach(model="net", data="data")
    workload = session.workload
    assert workload
    described = f"GPT-2 of {workload.parameters / 1e6:.1f} million weights, 20,000 words, 8 sequences of 64"
    return described, [measured(session, name, knobs) for name, knobs in rungs.items()]


def measured(session: Session, name: str, change: dict[str, Any]) -> Rung:
    """Take turns with one rung and without."""
    predicted = dict[bool, Prediction]()
    peaks: dict[bool, list[int]] = {False: [], True: []}
    ratios = []
    for _ in range(ROUNDS):
        per_sample = {}
        for taken in (False, True):
            knobs = PLAIN | (change if taken else {})
            predicted[taken] = session.predict(**knobs)
            session.set(**knobs)
            session.train(2)
            session.run(EMPTY)
            frame = session.train(STEPS).frame()
            per_sample[taken] = frame.step_s.median()
            peaks[taken].append(int(frame.live_peak_bytes.max()))
        ratios.append(per_sample[True] / per_sample[False])
    name = name if session.size == 1 else f"{name}, {session.size} ranks"
    rung = Rung(name, max(peaks[False]), max(peaks[True]), predicted[True].live_peak_bytes, ratios)
    print(rung.row, flush=True)
    return rung


def pairs(session: Session, model: str, quick: bool) -> Iterator[Case]:
    """Measure each rung and each pair of them, as far as the model allows it."""
    pairs_of = (pair for pair in itertools.combinations(RUNGS.values(), 2) if not pair[0].keys() & pair[1].keys())
    chosen = [*((one,) for one in RUNGS.values()), *pairs_of]
    for number, changes in enumerate(chosen):
        knobs = PLAIN | {name: value for change in changes for name, value in change.items()}
        settings, workload = session.settings.replace(**knobs), session.workload
        if not usable(settings, workload, session.size) or (quick and number % 10):
            continue
        case = measure(session, model, knobs)
        off = "ran out of memory" if case.live is None else f"{100 * case.errors[2]:+.3f} %"
        print(f"{model} {changes}: {case.predicted.verdict}, {off}", flush=True)
        yield case


def report(described: str, rows: list[str], cases: list[Case]) -> str:
    """Return the figures as Markdown."""
    off = sorted(abs(case.errors[2]) for case in cases if case.live is not None)
    wrong = sum(case.predicted.verdict == (FITS if case.live is None else DOES_NOT_FIT) for case in cases)
    models = len({case.model for case in cases})
    return "\n".join(
        [
            f"{time.strftime('%d %B %Y')}, torch {importlib.metadata.version('torch')}, Python "
            f"{platform.python_version()}, one thread and a virtual GPU for each rank. {described}, fp32, AdamW; each "
            f"rung alone, in {ROUNDS} turns with the plain step, on one rank unless it says so.",
            "",
            "| rung | live peak | freed | predicted | time of a step | published |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            f"Each of these but compiled blocks and shares, and each pair of them, on {models} models "
            f"(three ready-made ones and transformers from small configurations), {len(cases)} flips: the live peak "
            f"was predicted within {100 * off[len(off) // 2]:.3f} % in the median and {100 * off[-1]:.2f} % at most, "
            f"with {wrong} wrong verdicts.",
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
