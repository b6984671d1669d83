"""What the plain scripts share: arguments, optimizer, data, one training step, and how samples/s are taken.

A plain script is what somebody would write by hand for one fixed choice of settings. It uses the toolkit's workload
(model, data, loss) and nothing else of it: no trainer, no allocator, no session.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from gpumem_nb import Workload
from gpumem_nb.workloads import catalog

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr),
    "adafactor": lambda params, lr: torch.optim.Adafactor(params, lr=lr),
}
LAYERS, WIDTH = "small-layers", 16
SKIPPED_SHARE = 0.1  # of the steps, at the start, before the clock runs


def arguments(description: str | None) -> argparse.Namespace:
    """The settings of the run; the defaults are those of ``gpumem_nb.Settings``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("workload", help=f"name of a ready-made workload, such as digits-resnet, or {LAYERS}")
    parser.add_argument("options", nargs="*", metavar="key=value", help="its options")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one micro-batch on one rank")
    parser.add_argument("--accumulation-steps", type=int, default=1)
    parser.add_argument("--precision", choices=("fp32", *DTYPES), default="fp32")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--follow", action="store_true", help="train as many steps as each line on standard input says, until 0"
    )
    args = parser.parse_args()
    options = dict(pair.split("=", 1) for pair in args.options)
    own = args.workload == LAYERS
    args.made = small_layers(int(options["count"])) if own else catalog.make(args.workload, **options)
    return args


def small_layers(count: int) -> Workload:
    """So many linear layers with two small weights each: what a step costs for each weight decides here."""

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))

    def data() -> Dataset[Any]:
        return TensorDataset(torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(0)))

    return Workload(LAYERS, model, data, lambda model, batch: model(batch[0]).square().mean())


def local_device(local_rank: int) -> torch.device:
    """The GPU of this rank, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def batches(data: Dataset[Any], batch_size: int, rank: int, size: int) -> Iterator[Any]:
    """Micro-batches of this rank's shard, reshuffled each epoch, without end."""
    sampler: Any = DistributedSampler(data, num_replicas=size, rank=rank)
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def autocast(precision: str, device: torch.device) -> Any:
    """The context of a forward pass."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=DTYPES[precision])


def to_device(batch: Any, device: torch.device) -> Any:
    """The tensors of a batch on the device."""
    return [part.to(device, non_blocking=True) for part in batch]


def measure(step: Callable[[], None], steps: int, samples_per_step: int, device: torch.device) -> dict[str, float]:
    """Train ``steps`` steps; samples/s of all ranks over those after the first tenth."""
    skipped = max(1, round(steps * SKIPPED_SHARE))
    began = 0.0
    for index in range(steps):
        if index == skipped:
            began = now(device)
        step()
    seconds = now(device) - began
    return {"samples_per_s": (steps - skipped) * samples_per_step / seconds, "seconds": seconds, "steps": steps}


def run(
    args: argparse.Namespace,
    step: Callable[[], None],
    rank: int,
    size: int,
    device: torch.device,
    agree: Callable[[int], int],
) -> None:
    """Measure once, or as often as rank 0 is asked to; ``agree`` gives every rank the number that rank 0 has."""
    samples_per_step = args.batch_size * args.accumulation_steps * size
    while steps := agree(int(sys.stdin.readline() or 0) if rank == 0 else 0) if args.follow else args.steps:
        measured = measure(step, steps, samples_per_step, device)
        if rank == 0:
            print(json.dumps(measured), flush=True)
        if not args.follow:
            break


def now(device: torch.device) -> float:
    """The clock, when the device is done with what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
