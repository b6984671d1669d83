"""What makes steps slow, planted for ``python -m tests.bench.verdicts``, and ordinary training with nothing planted.

Each fault is a real one on a small scale: time is computed, slept or lost to another program where it would be.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gpumem_nb import Workload
from gpumem_nb.workloads import catalog

Knobs = Mapping[str, Any]
PLAIN = {"batch_size": 32, "accumulation_steps": 1, "checkpointing": "none", "precision": "fp32"}


@dataclass(frozen=True)
class Case:
    """One run: what is planted, and the cause that the verdict should name (none for healthy ones).

    Attributes:
        words: which its sentence should have, too.
        settings: on top of ``PLAIN``.
        cell: run on ``ranks`` before training, or after ``healthy_steps`` of it.
        beside: what goes on meanwhile.
    """

    name: str
    cause: str
    workload: Callable[[], Workload]
    words: str = ""
    settings: Knobs = field(default_factory=dict)
    cell: str = ""
    ranks: tuple[int, ...] = (1,)
    healthy_steps: int = 0
    beside: Callable[[], AbstractContextManager[object]] = nullcontext


def rank() -> int:
    """Also in a worker of a rank."""
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def busy(seconds: float) -> None:
    """Compute for so long."""
    end_s, value = time.thread_time() + seconds, 1
    while time.thread_time() < end_s:
        value = (value * 31 + 7) % 1009


class Late(torch.utils.data.Dataset[Any]):
    """A dataset whose samples come late: from a slow disk, or because making them computes."""

    def __init__(self, dataset: Any, wait: Callable[[float], None], each_s: float, every: int, on: tuple[int, ...]):
        self.dataset, self.wait, self.each_s, self.every, self.on, self.given = dataset, wait, each_s, every, on, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        if rank() in self.on and self.given % self.every == 0:
            self.wait(self.each_s)
        return self.dataset[index]


def named(name: str, **options: Any) -> Workload:
    """A ready-made one."""
    return catalog.make(name, **options)


def late(
    name: str, wait: Callable[[float], None], each_s: float, every: int = 1, on: tuple[int, ...] = (0, 1)
) -> Workload:
    """With late samples."""
    workload = named(name)
    return dataclasses.replace(workload, data=lambda: Late(workload.data(), wait, each_s, every, on))


def uneven(name: str, extra_s: float, one_in: int) -> Workload:
    """A loss that costs more for some samples: on each rank in one step of some, not the same on all ranks."""
    workload, steps = named(name), [0]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        steps[0] += 1
        if hash((rank(), steps[0] * 2654435761 % 2**32 // 65536)) % one_in == 0:
            busy(extra_s)
        return workload.loss(model, batch)

    return dataclasses.replace(workload, loss=loss)


class Orthogonal(torch.optim.SGD):
    """Makes each matrix's gradient orthogonal by some rounds of Newton and Schulz, as Muon does."""

    rounds = 5

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.ndim >= 2:
                    update = param.grad.flatten(1)
                    update = update / (update.norm() + 1e-7)
                    for _ in range(self.rounds):
                        square = update @ update.T
                        update = 1.5 * update - 0.5 * square @ update
                    param.grad.copy_(update.view_as(param.grad))
        return super().step(closure)


class Whitening(torch.optim.SGD):
    """Divides each matrix's gradient by the roots of its covariances on both sides, as Shampoo does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.ndim >= 2:
                    flat = param.grad.flatten(1)
                    for matrix in (flat, flat.T):
                        values, vectors = torch.linalg.eigh(matrix @ matrix.T + 1e-4 * torch.eye(len(matrix)))
                        matrix.copy_(vectors * values.rsqrt() @ vectors.T @ matrix)
        return super().step(closure)


class Handmade(torch.optim.SGD):
    """Looks at every weight's values from Python."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                for value in param.flatten()[:100_000].tolist():
                    if value != value:
                        raise ValueError("not a number")
        return super().step(closure)


def heavy(name: str, optimizer: type[torch.optim.SGD], rounds: int = 5) -> Workload:
    """With this optimizer."""

    def make(params: Any) -> torch.optim.Optimizer:
        made = optimizer(params, lr=1e-3)
        if isinstance(made, Orthogonal):
            made.rounds = rounds
        return made

    return dataclasses.replace(named(name), optimizer=make)


@contextmanager
def hogs(*cores: int) -> Iterator[None]:
    """Other programs that compute on these cores."""
    spin = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin, str(core)]) for core in cores]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


SLEEPS = "import time; hook = model.register_forward_pre_hook(lambda *_: time.sleep({seconds}))"
COMPUTES = """
import time, torch
def compute(*_):
    end, a = time.perf_counter() + {seconds}, torch.ones(64, 64)
    while time.perf_counter() < end:
        a @ a
hook = model.{register}(compute)
"""
FORWARD, BACKWARD = "register_forward_pre_hook", "register_full_backward_hook"

DISK = [
    Case("text, 1 ms a sample", "data", partial(late, "text-gpt", time.sleep, 0.001), "reading samples is slow"),
    Case(
        "digits, 0.5 ms a sample", "data", partial(late, "digits-resnet", time.sleep, 0.0005), "reading samples is slow"
    ),
    Case(
        "40 ms in one sample of 64", "data", partial(late, "text-gpt", time.sleep, 0.08, 64), "reading samples is slow"
    ),
    Case("rank 1 alone, 1 ms", "data", partial(late, "text-gpt", time.sleep, 0.001, on=(1,)), "Rank 1"),
    Case("a worker, 5 ms", "data", partial(late, "text-gpt", time.sleep, 0.005), "not keep up", {"num_workers": 1}),
]
PYTHON = [
    Case("text, 1 ms a sample", "data", partial(late, "text-gpt", busy, 0.001), "computing"),
    Case("digits, 0.5 ms a sample", "data", partial(late, "digits-resnet", busy, 0.0005), "computing"),
    Case("digits, 2 ms a sample", "data", partial(late, "digits-resnet", busy, 0.002), "computing"),
    Case("rank 1 alone, 1 ms", "data", partial(late, "text-gpt", busy, 0.001, on=(1,)), "Rank 1"),
    Case("accumulating", "data", partial(late, "digits-resnet", busy, 0.001), "computing", {"accumulation_steps": 2}),
]
TEXT, DIGITS = partial(named, "text-gpt"), partial(named, "digits-resnet")
SLOW = [
    Case("sleeps in forward", "slow rank", TEXT, "Rank 1", cell=SLEEPS.format(seconds=0.05)),
    Case("computes in forward", "slow rank", TEXT, "Rank 1",
         cell=COMPUTES.format(seconds=0.04, register=FORWARD)),
    Case("computes in backward", "slow rank", TEXT, "backward",
         cell=COMPUTES.format(seconds=0.04, register=BACKWARD)),
    Case("rank 0", "slow rank", DIGITS, "Rank 0", cell=SLEEPS.format(seconds=0.03), ranks=(0,)),
    Case("from step 40 on", "slow rank", DIGITS, "since step", cell=SLEEPS.format(seconds=0.05), healthy_steps=40),
]  # fmt: skip
UNEVEN = [
    Case(f"{name}, {1000 * extra_s:.0f} ms in one of {one_in}", "uneven steps", partial(uneven, name, extra_s, one_in))
    for name, extra_s, one_in in (
        ("text-gpt", 0.06, 2),
        ("text-gpt", 0.15, 4),
        ("digits-resnet", 0.04, 2),
        ("digits-resnet", 0.08, 3),
        ("digits-separable", 0.06, 2),
    )
]
TINY = [
    Case(f"{name}, {size} a micro-batch", "tiny operators", partial(named, name), settings={"batch_size": size})
    for name, size in (
        ("text-gpt", 1),
        ("text-gpt", 2),
        ("digits-resnet", 1),
        ("digits-resnet", 2),
        ("digits-separable", 1),
    )
]
UPDATE = [
    Case("Newton and Schulz, 5 rounds", "update", partial(heavy, "text-gpt", Orthogonal, 30)),
    Case("the same, digits", "update", partial(heavy, "digits-resnet", Orthogonal, 40)),
    Case("covariances, text", "update", partial(heavy, "text-gpt", Whitening)),
    Case("covariances, digits", "update", partial(heavy, "digits-separable", Whitening)),
    Case("weights in Python", "update", partial(heavy, "text-gpt", Handmade)),
]
CORE = [
    Case("on core 0", "no core", TEXT, beside=partial(hogs, 0)),
    Case("on core 1", "no core", TEXT, beside=partial(hogs, 1)),
    Case("on core 1, digits", "no core", DIGITS, beside=partial(hogs, 1)),
    Case("two on core 0", "no core", DIGITS, beside=partial(hogs, 0, 0)),
    Case("on both cores", "no core", TEXT, beside=partial(hogs, 0, 1)),
]
# By how many Mbit/s the network carries; run on two hosts.
NETWORK = [
    Case(f"{name}, {rate} Mbit/s", "reduction", partial(named, name), settings={"rate": rate})
    for name, rate in (
        ("text-gpt", 50),
        ("text-gpt", 100),
        ("text-gpt", 200),
        ("digits-resnet", 50),
        ("digits-resnet", 100),
    )
]
PLANTED = {
    "a slow disk": DISK,
    "Python in the data path": PYTHON,
    "a slow rank": SLOW,
    "an uneven loss": UNEVEN,
    "tiny micro-batches": TINY,
    "a heavy optimizer": UPDATE,
    "other load on a core": CORE,
}
HEALTHY = [
    Case(f"{name} {' '.join(f'{knob}={value}' for knob, value in settings.items())}", "", partial(named, name),
         settings=settings)
    for name in ("text-gpt", "digits-resnet", "digits-separable")
    for settings in (
        {"batch_size": 32},
        {"batch_size": 48},
        {"batch_size": 64},
        {"batch_size": 128},
        {"batch_size": 32, "accumulation_steps": 2},
        {"batch_size": 32, "checkpointing": "blocks"},
        {"batch_size": 64, "checkpointing": "sqrt"},
        {"batch_size": 32, "optimizer": "sgd"},
        {"batch_size": 32, "optimizer": "momentum"},
        {"batch_size": 32, "optimizer_impl": "fused"},
        {"batch_size": 64, "accumulation_steps": 4},
        {"batch_size": 64, "clip_norm": 1.0},
        {"batch_size": 32, "num_workers": 1},
    )
] + [Case("text-gpt wider", "", partial(named, "text-gpt", width=128, depth=4))]  # fmt: skip
