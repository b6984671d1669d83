"""Cases of the clinic in which an update is not what it should be."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.nn.utils import clip_grad_norm_

from ...memory.device import opened
from .bench import Batch, Names, batches, flat, mlp, mse, off, peak_of, seeded

PARTS, ROWS, RATE = (4, 8), 512, 0.1
SCALE, MOST_NORM = 1024.0, 1.0


class Counted(torch.optim.SGD):
    """SGD that counts its updates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=RATE)
        self.updates = 0

    def step(self, closure: Any = None) -> Any:
        """Update."""
        self.updates += 1
        return super().step(closure)


def accumulate(names: Names) -> dict[str, Any]:
    """Take steps of several micro-batches, each beside that of one large batch."""
    with seeded():
        model, large = mlp(), batches(len(PARTS), ROWS)
    optimizer, results = Counted(model), []
    for parts, (inputs, targets) in zip(PARTS, large, strict=True):
        plain, was, before = copy.deepcopy(model), _weights(model), optimizer.updates
        micro = list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))
        right, last = RATE * _gradient(plain, (inputs, targets)), _gradient(plain, micro[-1])
        peak = peak_of(lambda: names["accumulate"](model, optimizer, micro))  # noqa: B023
        done = was - _weights(model)
        results.append(
            {
                "parts": parts,
                "updates": optimizer.updates - before,
                "off": off(done, right),
                "times": float(done.norm() / right.norm()),
                "last": float(cosine_similarity(done, last, 0)),
                "peak": peak / peak_of(lambda: _gradient(plain, (inputs, targets))),  # noqa: B023
            }
        )
    return {"steps": results}


def _gradient(model: nn.Module, batch: Batch) -> Tensor:
    return flat(torch.autograd.grad(mse(model(batch[0]), batch[1]), list(model.parameters())))


def _weights(model: nn.Module) -> Tensor:
    return flat(list(model.parameters()))


def clipped_step(names: Names) -> dict[str, Any]:
    """Take steps with gradients that are small, that are large, and that overflow."""
    with seeded():
        model, data = mlp(), batches(3, 32)
    scaler = torch.amp.GradScaler(opened().torch_device.type, init_scale=SCALE)
    optimizer, found = Counted(model), {}
    for name, times, (inputs, targets) in zip(("small", "large"), (1.0, 1e3), data[:2], strict=True):
        batch = inputs, targets * times
        plain, was = copy.deepcopy(model), _weights(model)
        plain.zero_grad()
        mse(plain(batch[0]), batch[1]).backward()
        norm = float(clip_grad_norm_(plain.parameters(), MOST_NORM))
        torch.optim.SGD(plain.parameters(), lr=RATE).step()
        names["clipped_step"](model, optimizer, scaler, batch)
        found[name] = {
            "norm": norm,
            "off": off(_weights(model) - was, _weights(plain) - was),
            "times": float((_weights(model) - was).norm() / (_weights(plain) - was).norm()),
        }
        model.load_state_dict(plain.state_dict())
    was, inputs = _weights(model), data[2][0]
    scale = scaler.get_scale()
    names["clipped_step"](model, optimizer, scaler, (inputs, inputs + math.inf))
    kept = torch.equal(was, _weights(model))
    return {**found, "skips": kept, "scales": scaler.get_scale() < scale}
