"""Cases of the clinic in which the ranks do not do what one training on several devices does."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ...engine.link.communicator import here
from ...memory.device import opened
from .bench import Names, batches, flat, mlp, mse, numbers, seeded

SAMPLES, EPOCHS = 64, 2


def loader_of(names: Names) -> dict[str, Any]:
    """Go through two epochs of numbered samples."""
    rows = TensorDataset(torch.arange(SAMPLES))
    seen = []
    for epoch in range(EPOCHS):
        with seeded(1000 * epoch + here().rank):  # what is drawn without a seed is not the same on two ranks
            seen.append(
                [int(number) for batch in names["loader_of"](rows, epoch) for number in _first(batch).flatten()]
            )
    return {"seen": seen, "samples": SAMPLES}


def _first(batch: Any) -> Tensor:
    found = batch[0] if isinstance(batch, list | tuple) else batch
    return torch.as_tensor(found)


def build(names: Names) -> dict[str, Any]:
    """Build a model with two seeds, and draw what dropout would draw next."""
    with seeded():
        first = _checksum(names["build"](3))
        draws = torch.rand(4).tolist()
        return {
            "weights": first,
            "draws": draws,
            "again": _checksum(names["build"](3)),
            "other": _checksum(names["build"](4)),
        }


def _checksum(model: nn.Module) -> str:
    return hashlib.sha256(flat(list(model.state_dict().values())).cpu().numpy().tobytes()).hexdigest()


CALLS = 110
WIDE = 192


def logged_loss(names: Names) -> dict[str, Any]:
    """Time steps with a log, on the processor's clock of this thread: what other programs do is not in it."""
    with seeded():
        model, (batch,) = mlp(WIDE), batches(1, 16, WIDE)
    log = names.get("log")
    before = len(log) if isinstance(log, list) else 0
    weight = next(model.parameters()).detach()
    names["logged_loss"](model, batch)
    bare = _seconds(lambda: mse(model(batch[0]), batch[1]), CALLS)
    norm = _seconds(lambda: torch.linalg.matrix_norm(weight, 2), 10) / 10
    took = _seconds(lambda: names["logged_loss"](model, batch), CALLS)
    log = names.get("log")
    logged = numbers(log[before:]) if isinstance(log, list) else None
    return {
        "norms": max(0.0, took - bare) / norm / CALLS,
        "logged": bool(logged) and all(one > 0 for one in logged or []),
    }


def _seconds(call: Callable[[], object], times: int) -> float:
    began_s = time.thread_time()
    for _ in range(times):
        call()
    return time.thread_time() - began_s


def before_evaluation(names: Names) -> dict[str, Any]:
    """Gather statistics of samples that differ between ranks, and evaluate the same samples on all of them."""
    with seeded():
        model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)).to(
            opened().torch_device
        )
    rank = here().rank
    with seeded(rank):
        own = [inputs * (1 + rank) + rank for inputs, _ in batches(8, 32, 16)]
    with seeded(7):
        ((same, _),) = batches(1, 64, 16)
    model.train()
    with torch.no_grad():
        for inputs in own:
            model(inputs)
    weights, own_ones = flat(list(model.parameters())), _statistics(model)
    names["before_evaluation"](model)
    model.eval()
    with torch.no_grad():
        outputs = model(same).flatten().tolist()
    return {
        "kept": torch.equal(weights, flat(list(model.parameters()))),
        "outputs": outputs,
        "own": own_ones,
        "now": _statistics(model),
    }


def _statistics(model: nn.Module) -> list[list[float]]:
    """Return mean and variance by which batch norm normalises in an evaluation."""
    return [value.tolist() for name, value in model.named_buffers() if value.is_floating_point()]
