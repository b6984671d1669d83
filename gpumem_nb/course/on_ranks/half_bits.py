"""What lesson 4 tries out inside of a rank: rounding, overflows, and a student's update with a loss scaler."""

from __future__ import annotations

from typing import Any

import torch

from .bench import Names, seeded

RATE, MAX_NORM = 0.5, 1.0
LARGE, MIDDLE, SMALL = 8.0, 1.5, 0.75
"""Norms of the gradients that are tried: two that are clipped, and one that is left alone."""


def rounded(step: float, steps: int) -> dict[str, float]:
    """Add a small number to a weight of 1 many times; return what it is then in each type."""
    found = {}
    for name in ("float32", "float16", "bfloat16"):
        weight = torch.ones((), dtype=getattr(torch, name))
        for _ in range(steps):
            weight += step
        found[name] = float(weight)
    return found


def skipped_updates(gradient: float, most: int = 40) -> int:
    """Train one weight under fp16 whose gradient is this; return how many updates are skipped before the first."""
    with seeded():
        net = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    inputs = torch.full((16, 1), gradient)
    for skipped in range(most):
        before = net.weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = net(inputs).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not torch.equal(net.weight, before):
            return skipped
    return most


def update(names: Names) -> dict[str, Any]:
    """Try a function ``update(net, loss, optimizer, scaler)`` of the student's.

    Returns:
        ``large``, ``middle`` and ``small``: the change of the weights by two gradients that must be clipped, and by one
        that must not, as a multiple of what it should be; ``kept``: whether a gradient that overflowed left the
        weights alone; ``scale``: the loss scale after that, as a share of the one before; ``again``: as ``large``,
        after the overflow; ``error``: what the function raised, after which nothing was tried.
    """
    with seeded():
        net = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu")

    def change(norm: float) -> torch.Tensor:
        """Return by how much a gradient of this norm, the same in each direction, changes the weights."""
        with torch.no_grad():
            net.weight.fill_(0.125)
        before = net.weight.detach().clone()
        optimizer.zero_grad()
        names["update"](net, net(torch.full((1, 4), norm / 2)).sum(), optimizer, scaler)
        return before - net.weight.detach()

    def share(norm: float) -> float:
        return float(change(norm).sum() / 2) / (RATE * min(norm, MAX_NORM))

    found: dict[str, Any] = {"error": "", "norms": (LARGE, SMALL)}
    try:
        found["large"], found["middle"], found["small"] = share(LARGE), share(MIDDLE), share(SMALL)
        before = scaler.get_scale()
        found["kept"] = not change(float("inf")).any()
        found["scale"] = scaler.get_scale() / before
        found["again"] = share(LARGE)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found
