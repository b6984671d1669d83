"""Predicted against measured memory, on one rank, of flips of ready-made and other people's models.

``python -m tests.bench.prediction`` writes docs/prediction.md and its plot.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpumem_nb
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, Prediction
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError
from gpumem_nb.shared.units import format_bytes
from tests.bench import plot
from tests.internals import predicted_by_small_steps

REPORT = Path(__file__).parents[2] / "docs" / "prediction.md"
MARKER = "<!-- the rest is written by python -m tests.bench.prediction -->\n"
LIMIT_MIB = 1024
STEPS = 6  # of which what came is read
TIMED_S, MOST_TIMED = 1.0, 40  # and as many more for samples/s
EMPTY = "from gpumem_nb.memory.virtual_gpu.gpu import library; library().gpumem_empty_cache()"
SEQUENCES = """
import torch
torch.manual_seed(0)
ids = torch.randint(0, 200, (256, 48))
data = [{"input_ids": row, "labels": row} for row in ids]
labelled = [{"input_ids": row, "labels": torch.tensor(int(row[0]) % 2)} for row in ids]
pictures = [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.tensor(index % 4)} for index in range(256)]
"""
# Small configurations of models that nothing here was calibrated on: (name, code that defines ``net``, data).
OTHERS = (
    ("GPT-2", "from transformers import GPT2Config as C, GPT2LMHeadModel as M\n"
     "net = M(C(vocab_size=200, n_positions=64, n_embd=64, n_layer=4, n_head=4, use_cache=False))", "data"),
    ("Llama", "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
     "net = M(C(vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, "
     "use_cache=False))", "data"),
    ("OPT", "from transformers import OPTConfig as C, OPTForCausalLM as M\n"
     "net = M(C(vocab_size=200, hidden_size=64, ffn_dim=128, num_hidden_layers=4, num_attention_heads=4, "
     "max_position_embeddings=64, word_embed_proj_dim=64, use_cache=False))", "data"),
    ("BERT", "from transformers import BertConfig as C, BertForSequenceClassification as M\n"
     "net = M(C(vocab_size=200, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128))",
     "labelled"),
    ("DistilBERT", "from transformers import DistilBertConfig as C, DistilBertForSequenceClassification as M\n"
     "net = M(C(vocab_size=200, dim=64, n_layers=4, n_heads=4, hidden_dim=128))", "labelled"),
    ("ViT", "from transformers import ViTConfig as C, ViTForImageClassification as M\n"
     "net = M(C(image_size=32, patch_size=4, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, "
     "intermediate_size=128, num_labels=4))", "pictures"),
    ("ResNet", "from transformers import ResNetConfig as C, ResNetForImageClassification as M\n"
     "net = M(C(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type='basic', num_labels=4))",
     "pictures"),
    ("RoBERTa", "from transformers import RobertaConfig as C, RobertaForSequenceClassification as M\n"
     "net = M(C(vocab_size=200, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128))",
     "labelled"),
    ("Qwen2", "from transformers import Qwen2Config as C, Qwen2ForCausalLM as M\n"
     "net = M(C(vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, "
     "num_key_value_heads=2, use_cache=False))", "data"),
    ("ELECTRA", "from transformers import ElectraConfig as C, ElectraForSequenceClassification as M\n"
     "net = M(C(vocab_size=200, embedding_size=32, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, "
     "intermediate_size=128))", "labelled"),
)  # fmt: skip
READY = ("digits-resnet", "digits-separable", "text-gpt")
CONVOLUTIONAL = ("digits-resnet", "digits-separable", "ResNet")


@dataclass(frozen=True)
class Case:
    """One flip: what was said before, by small steps alone too, and what came; ``None`` where it ran out of memory."""

    model: str
    small: Prediction
    predicted: Prediction
    live: int | None
    reserved: int | None
    samples_per_s: float | None = None

    @property
    def errors(self) -> tuple[float, ...]:
        """By small steps, and as shown, of the live and the reserved peak as shares of what came; of throughput."""
        assert self.live
        assert self.reserved
        assert self.samples_per_s
        peaks = [
            error
            for said in (self.small, self.predicted)
            for error in (said.live_peak_bytes / self.live - 1, said.reserved_peak_bytes / self.reserved - 1)
        ]
        return (*peaks, (self.predicted.samples_per_s or 0) / self.samples_per_s - 1)


def main() -> int:
    """Measure all and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the flips, and no page")
    args = parser.parse_args()
    cases: list[Case] = []
    with gpumem_nb.start(1, device="cpu", memory_limit=f"{LIMIT_MIB}MiB") as session:
        for name in loaded(session):
            for number, knobs in enumerate(flips()):
                if not args.quick or number % 10 == 0:
                    case = measure(session, name, knobs)
                    cases.append(case)
                    print(f"{name} {knobs}: {words(case)}", flush=True)
    text = report(cases)
    print(text)
    if not args.quick:
        drawn = plot.draw("prediction", comparisons(cases))
        REPORT.write_text(REPORT.read_text().partition(MARKER)[0] + MARKER + text + drawn)
    return 0


def loaded(session: Session) -> Iterator[str]:
    """Load one model after another."""
    for name in READY:
        session.load(name)
        yield name
    session.run(SEQUENCES)
    for name, code, data in OTHERS:
        session.run(f"torch.manual_seed(0)\n{code}")
        session.attach(model="net", data=data)
        yield name


def flips() -> Iterator[dict[str, Any]]:
    """Settings whose batch is up to 32 times that of the larger small step."""
    for precision, checkpointing, optimizer in itertools.product(
        ("fp32", "bf16"), ("none", "blocks", "sqrt"), ("adamw", "sgd")
    ):
        for batch_size, accumulation_steps in ((16, 1), (32, 2), (128, 1)) if optimizer == "adamw" else ((128, 1),):
            yield {
                "precision": precision,
                "checkpointing": checkpointing,
                "optimizer": optimizer,
                "batch_size": batch_size,
                "accumulation_steps": accumulation_steps,
            }


def measure(session: Session, model: str, knobs: dict[str, Any]) -> Case:
    """Predict, flip, and look at the steps after the first, which finds an empty cache; at more of them for speed."""
    small, predicted = predicted_by_small_steps(session, knobs), session.predict(**knobs)
    try:
        session.set(**knobs)
        session.train(2)
        session.run(EMPTY)
        run = session.train(STEPS)
    except GpumemError:
        return Case(model, small, predicted, None, None)
    if session.settings.batch_size != knobs["batch_size"]:  # out of memory, and back
        return Case(model, small, predicted, None, None)
    frame = run.frame()
    session.train(min(MOST_TIMED, math.ceil(TIMED_S / frame.step_s.median())))
    now = session.history.now()
    assert now
    return Case(
        model,
        small,
        predicted,
        int(frame.live_peak_bytes.max()),
        int(frame.reserved_peak_bytes.max()),
        now.samples_per_s,
    )


def words(case: Case) -> str:
    """One line of the log."""
    if case.live is None:
        return f"{case.predicted.verdict}, and ran out of memory"
    *peaks, _ = case.errors
    said = ", ".join(f"{100 * error:+.3f} %" for error in peaks)
    return f"live and reserved by small steps, and as shown: {said}, {case.small.basis}"


def report(cases: Sequence[Case]) -> str:
    """The figures as Markdown."""
    headings = ["model", "flips"]
    for by in ("small steps", "as shown"):
        headings += [f"{by}: live, median", "live, p95", "reserved, median", "reserved, p95", "within low to high"]
    headings += ["samples/s, median", "within 10 %"]
    rows = [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    for name in [*dict.fromkeys(case.model for case in cases), ""]:
        of_model = [case for case in cases if name in ("", case.model) and case.live is not None]
        rows.append(_row(name or "all", of_model))
    wrong = [case for case in cases if case.live is None and case.predicted.verdict == FITS]
    wrong += [case for case in cases if case.live is not None and case.predicted.verdict == DOES_NOT_FIT]
    wrong_small = sum(case.small.verdict == (FITS if case.live is None else DOES_NOT_FIT) for case in cases)
    took = sorted(case.predicted.seconds for case in cases)
    took_small = sorted(case.small.seconds for case in cases)
    return "\n".join(
        [
            f"{time.strftime('%d %B %Y')}, torch {importlib.metadata.version('torch')}, Python "
            f"{platform.python_version()}, one rank, virtual GPU of {format_bytes(LIMIT_MIB * 2**20)}, "
            f"{len(cases)} flips.",
            "",
            *rows,
            "",
            f"Wrong verdicts: {wrong_small} and {len(wrong)} of {len(cases)}. A prediction by small steps took "
            f"{took_small[len(took) // 2]:.2f} s in the median, {took_small[int(0.95 * len(took))]:.2f} s at the "
            f"95th percentile; one with whole steps {took[len(took) // 2]:.2f} s and "
            f"{took[int(0.95 * len(took))]:.2f} s.",
            "",
        ]
    )


def comparisons(cases: Sequence[Case]) -> list[plot.Comparison]:
    """What is plotted: memory said by small steps, and throughput, against what came."""
    reserved: dict[str, list[plot.Point]] = {"transformers": [], "convolutional networks": []}
    speed: dict[str, list[plot.Point]] = {"transformers": [], "convolutional networks": []}
    for case in cases:
        group = "convolutional networks" if case.model in CONVOLUTIONAL else "transformers"
        if case.reserved is not None:
            reserved[group].append(plot.Point(case.reserved / 2**20, case.small.reserved_peak_bytes / 2**20))
        if case.samples_per_s is not None and case.predicted.samples_per_s is not None:
            speed[group].append(plot.Point(case.samples_per_s, case.predicted.samples_per_s))
    return [
        plot.Comparison("reserved memory from small steps", "MiB", 0.05, reserved),
        plot.Comparison("throughput", "samples/s", 0.1, speed),
    ]


def _row(name: str, cases: Sequence[Case]) -> str:
    errors = [sorted(abs(case.errors[which]) for case in cases) for which in range(5)]

    def at(values: list[float], share: float) -> str:
        return f"{100 * values[min(len(values) - 1, int(share * len(values)))]:.3f} %"

    figures: list[str] = []
    for which, said in enumerate(([case.small for case in cases], [case.predicted for case in cases])):
        came = [case.reserved or 0 for case in cases]
        within = sum(one.low_bytes <= size <= one.high_bytes for one, size in zip(said, came, strict=True))
        figures += [at(values, share) for values in errors[2 * which : 2 * which + 2] for share in (0.5, 0.95)]
        figures.append(_share(within, cases))
    speed = errors[4]
    figures += [f"{100 * speed[len(speed) // 2]:.1f} %", _share(sum(error <= 0.1 for error in speed), cases)]
    return f"| {name} | {len(cases)} | {' | '.join(figures)} |"


def _share(count: int, cases: Sequence[Case]) -> str:
    return f"{100 * count / max(1, len(cases)):.0f} %"


if __name__ == "__main__":
    raise SystemExit(main())
