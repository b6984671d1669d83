"""Exercises of lesson 3: gradients that are added up in parts, and how noisy they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...engine.link.communicator import here
from .bench import Batch, Names, flat, seeded

Loss = Callable[[nn.Module], Tensor]
_PADDING = -100


def accumulate(names: Names, rows: int, count: int) -> dict[str, Any]:
    """Watch the student's function add up gradients of ``count`` parts of ``rows`` samples each."""
    with seeded(5):
        net = _net()
        parts = [(torch.randn(rows, 6), torch.randint(3, (rows,))) for _ in range(count)]

    def one(net: nn.Module, part: Batch) -> Tensor:
        return cross_entropy(net(part[0]), part[1])

    def total(net: nn.Module) -> Tensor:
        return _sum(one(net, part) for part in parts)

    losses: dict[str, Loss] = {
        "right": lambda net: total(net) / count,
        "undivided": total,
        "last": lambda net: one(net, parts[-1]),
        "last, divided": lambda net: one(net, parts[-1]) / count,
        "summed": lambda net: total(net) * rows,
        "by samples": lambda net: total(net) / rows,
        "by ranks": lambda net: total(net) / here().size,
    }
    return _watched(names["accumulate"], net, parts, losses)


def accumulate_tokens(names: Names, rows: int) -> dict[str, Any]:
    """Watch it add up those of two parts of ``rows`` samples and one of half as many, which are padded."""
    with seeded(6):
        net = _net()
        parts = [(torch.randn(few, 5, 6), torch.randint(3, (few, 5))) for few in (rows, rows, rows // 2)]
    for (_, labels), kept in zip(parts, (5, 2, 4), strict=True):
        labels[1:, kept:] = _PADDING
    tokens = sum(int((labels != _PADDING).sum()) for _, labels in parts)
    samples = sum(len(labels) for _, labels in parts)

    def one(net: nn.Module, part: Batch, how: str) -> Tensor:
        return cross_entropy(net(part[0]).flatten(0, 1), part[1].flatten(), reduction=how)

    def total(net: nn.Module, how: str) -> Tensor:
        return _sum(one(net, part, how) for part in parts)

    losses: dict[str, Loss] = {
        "right": lambda net: total(net, "sum") / tokens,
        "parts": lambda net: total(net, "mean") / len(parts),
        "samples": lambda net: _sum(one(net, part, "mean") * len(part[0]) for part in parts) / samples,
        "positions": lambda net: total(net, "sum") / (5 * samples),
        "undivided": lambda net: total(net, "mean"),
        "summed": lambda net: total(net, "sum"),
        "last": lambda net: one(net, parts[-1], "mean"),
    }
    return _watched(names["accumulate_tokens"], net, parts, losses)


def noise(few: int, many: int) -> list[float]:
    """Return the mean square of a gradient's noise with batches of two sizes."""
    with seeded(7):
        net, inputs = nn.Linear(8, 3), torch.randn(256, 8)
        labels = (inputs[:, :3] + torch.randn(256, 3)).argmax(1)
        weights = list(net.parameters())
        each = torch.stack(
            [
                flat(torch.autograd.grad(cross_entropy(net(row), label), weights))
                for row, label in zip(inputs, labels, strict=True)
            ]
        )
        off = [each[torch.randint(256, (4000, size))].mean(1) - each.mean(0) for size in (few, many)]
    return [float(one.square().sum(1).mean()) for one in off]


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _sum(losses: Any) -> Tensor:
    return torch.stack(list(losses)).sum()


def _gradient(net: nn.Module) -> Tensor | None:
    grads = [weight.grad for weight in net.parameters() if weight.grad is not None]
    if len(grads) < len(list(net.parameters())) or not any(grad.any() for grad in grads):
        return None
    return flat(grads)


def _watched(
    function: Callable[..., object], net: nn.Module, parts: Sequence[Batch], losses: Mapping[str, Loss]
) -> dict[str, Any]:
    """Run the student's function twice, say which loss its gradient is of, and how the parts went through the net."""
    known = {name: flat(torch.autograd.grad(loss(net), list(net.parameters()))) for name, loss in losses.items()}
    before, events, found, length = flat(list(net.parameters())).clone(), list[int](), list[str](), 0.0

    def forward(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        events.append(len(given[0]))
        if output.requires_grad:
            output.register_hook(lambda _: events.append(0))

    handle = net.register_forward_hook(forward)
    try:
        for _ in range(2):  # in the second turn gradients are there already
            function(net, parts)
            grad = _gradient(net)
            found.append("none" if grad is None else _of_which(grad, known))
            length = 0.0 if grad is None else float(grad.norm())
            if found[0] != "right":
                break
    finally:
        handle.remove()
    waiting = [sum(1 if event else -1 for event in events[:place]) for place in range(len(events) + 1)]
    return {
        "found": found,
        "length": length,
        "wanted": float(known["right"].norm()),
        "moved": not torch.equal(before, flat(list(net.parameters()))),
        "largest": max(events, default=0),
        "waiting": max(waiting),
    }


def _of_which(grad: Tensor, known: Mapping[str, Tensor]) -> str:
    near = (name for name, one in known.items() if (grad - one).norm() < 1e-3 * one.norm())
    return next(near, "other")
