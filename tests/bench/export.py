"""Exported scripts under random settings, and of attached models, each held against its session for a hundred steps.

``python -m tests.bench.export [STEPS [CASE …]]`` prints a line for each, and ends with an error where losses differ by
more than rounding, or the peak by more than 1 % (that of DistributedDataParallel, whose buckets stay, is not counted).
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.settings import Settings
from tests import exported

CASES, STEPS = 20, 100
ROUNDING, MOST_OFF = 1e-4, 0.01
SMALL = {
    "digits-resnet": {"width": 8, "depth": 2, "resolution": 8},
    "digits-separable": {"width": 16, "depth": 3, "resolution": 8},
    "text-gpt": {"width": 32, "depth": 3, "heads": 2, "sequence_length": 32},
}
GPT2 = """
import transformers
torch.manual_seed(1)
net = transformers.GPT2LMHeadModel(
    transformers.GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=97, n_positions=16)
)
tokens = torch.randint(0, 97, (200, 16))
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(tokens)
    def __getitem__(self, index):
        return {"input_ids": tokens[index], "labels": tokens[index]}
rows = Rows()
"""


def random_settings(numbers: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A workload, its options and knobs that go together."""
    name = numbers.choice(list(SMALL))
    options: dict[str, Any] = dict(SMALL[name])
    if name == "text-gpt":
        options["dropout"] = numbers.choice([0.0, 0.1])
    schedule = numbers.choice(["constant", "cosine", "linear"])
    knobs = {
        "precision": numbers.choice(["fp32", "fp32", "fp32", "bf16", "fp16"]),
        "checkpointing": numbers.choice(["none", "blocks", "sqrt"]),
        "batch_size": numbers.choice([3, 4, 8, 16]),
        "accumulation_steps": numbers.choice([1, 2, 3]),
        "optimizer": numbers.choice(["sgd", "momentum", "adam", "adamw", "adafactor"]),
        "optimizer_impl": numbers.choice(["default", "foreach", "fused", "loop"]),
        "learning_rate": numbers.choice([1e-3, 5e-3]),
        "lr_schedule": schedule,
        "schedule_steps": None if schedule == "constant" else numbers.choice([40, 200]),
        "warmup_steps": numbers.choice([0, 7]),
        "lr_scaling": numbers.choice(["none", "none", "linear", "sqrt"]),
        "clip_norm": numbers.choice([None, 0.5]),
        "num_workers": numbers.choice([0, 0, 1]),
        "compression": numbers.choice(["none", "none", "none", "fp16"]),
        "reduction": numbers.choice(["average", "average", "sum"]),
        "bucket_mib": numbers.choice([4, 0.02]),
        "fusion_threshold_mib": numbers.choice([None, 1]),
    }
    if knobs["optimizer"] == "adafactor" and knobs["optimizer_impl"] == "fused":
        knobs["optimizer_impl"] = "foreach"  # torch has no such kernel
    if knobs["lr_scaling"] != "none":
        knobs["reference_batch"] = 16
    return name, options, knobs


def compare(session: Session, run: Any, path: Path, ddp: bool) -> tuple[float, int, float, int]:
    """Of a script and what its session did: largest relative difference of losses, weights that differ, peak, lines."""
    written = session.export(path, ddp=ddp)
    ran = exported.run(path, steps=len(exported.mean_losses(run)), ddp=ddp, peaks=not ddp)
    losses = exported.mean_losses(run)
    assert ran.losses.keys() == losses.keys()
    worst = max(abs(ran.losses[step] / loss - 1) if loss else 0.0 for step, loss in losses.items())
    peak = max(ran.peaks) / exported.peak_of(run) - 1 if ran.peaks else 0.0
    return worst, len(exported.differing(session, ran)), peak, written.lines


def main() -> int:
    """Compare and print; the exit code."""
    steps, *chosen = [int(number) for number in sys.argv[1:]] or [STEPS]
    numbers, failed, equal, scripts = random.Random(7), 0, 0, 0
    cases = [random_settings(numbers) for _ in range(CASES)]
    gpt2 = {"batch_size": 4, "accumulation_steps": 2, "checkpointing": "blocks"}
    cases += [("GPT-2", {}, gpt2), ("GPT-2", {}, gpt2 | {"loss_head": "chunked", "precision": "bf16"})]
    cases.append(("text-gpt", SMALL["text-gpt"] | {"dropout": 0.1}, {"loss_head": "chunked", "precision": "fp16"}))
    kept = {"checkpointing": "selective", "batch_size": 8}
    cases.append(("GPT-2", {}, kept | {"activation_budget": 0.3, "precision": "bf16"}))
    cases.append(("text-gpt", SMALL["text-gpt"] | {"dropout": 0.1}, kept | {"activation_budget": 0.6}))
    cases.append(("digits-resnet", SMALL["digits-resnet"], kept | {"activation_budget": 0.5, "accumulation_steps": 2}))
    shared = {"shard_optimizer": "on", "batch_size": 4}
    cases.append(("text-gpt", SMALL["text-gpt"], shared | {"clip_norm": 0.5, "accumulation_steps": 2}))
    cases.append(("digits-resnet", SMALL["digits-resnet"], shared | {"optimizer": "momentum", "precision": "fp16"}))
    for case in chosen or range(len(cases)):
        name, options, knobs = cases[case]
        # Ranks of its own for each: what another workload has left there would count.
        with tempfile.TemporaryDirectory() as folder, gpumem_nb.start(2, device="cpu", threads=1) as session:
            if name == "GPT-2":
                session.run(GPT2)
                session.attach(model="net", data="rows")
            else:
                session.load(name, **options)
            session.set(**Settings(**knobs).changed_from(session.settings))
            run = session.train(steps)
            for ddp in (False, True):
                loss, weights, peak, lines = compare(session, run, Path(folder) / "train.py", ddp)
                # A script computes again what the session keeps of random numbers and of what is written in place.
                less = peak < 0 and knobs.get("checkpointing") == "selective"
                wrong = loss > ROUNDING or (abs(peak) > MOST_OFF and not less)
                failed, equal, scripts = failed + wrong, equal + (not weights and not loss), scripts + 1
                memory = "" if ddp else f"peak {100 * peak:+.2f} %, "
                shown = f"losses within {loss:.1e}, {weights} weights differ, {memory}{lines} lines"
                print(f"{case} {name} {'DDP' if ddp else 'Horovod'}: {shown}{' WRONG' * wrong}; {knobs}", flush=True)
    print(f"{equal} of {scripts} scripts equal to the last bit, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
