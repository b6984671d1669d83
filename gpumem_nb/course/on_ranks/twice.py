"""What lesson 5 tries out inside of a rank: the arithmetic of checkpointing, and a student's own checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from ...workloads.text import Block
from .bench import Names, seeded

_WIDTH, _SAMPLES = 32, 64


def arithmetic() -> dict[str, int]:
    """Count the floating-point operations of a step of a few transformer blocks, plain and each block checkpointed."""
    with seeded():
        blocks = [Block(64, 4, 0.0) for _ in range(2)]
        inputs = torch.randn(2, 64, 64, requires_grad=True)
    found = {}
    for name in ("none", "blocks"):
        features = inputs
        # Whole blocks, as the toolkit does it; torch stops where backward has all that it needs.
        with FlopCounterMode(display=False) as counted, set_checkpoint_early_stop(False):
            for block in blocks:
                features = block(features) if name == "none" else checkpoint(block, features, use_reentrant=False)
            forward = counted.get_total_flops()
            features.sum().backward()
        found[name] = counted.get_total_flops()
        found["forward"] = forward
    return found


def checkpointed(names: Names) -> dict[str, Any]:
    """Try a function of the student's that checkpoints ``layer1`` of a net.

    Returns:
        ``saved``: the bytes that forward keeps for backward, as a share of those of the plain net; ``calls``: how often
        each of two layers is computed in a step; ``frozen``: whether a weight needs no gradient; ``missing``: whether
        one got none; ``same``: whether all gradients are those of the plain net; ``error``: what was raised, and then
        nothing else is there.
    """
    plain, net = _net(), _net()
    calls = {"layer1": 0, "layer2": 0}

    def counts(layer: str) -> Any:
        def count(*_: Any) -> None:
            calls[layer] += 1

        return count

    for layer in calls:
        getattr(net, layer)[0].register_forward_hook(counts(layer))
    wanted, all_bytes = _step(plain)
    try:
        made = names["checkpointed"](net)
        calls.update(dict.fromkeys(calls, 0))
        gradients, saved_bytes = _step(made)
        frozen = not all(one.requires_grad for one in made.parameters())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    missing = any(one is None for one in gradients)
    same = len(gradients) == len(wanted) and all(
        one is not None and other is not None and one.allclose(other, atol=1e-6)
        for one, other in zip(gradients, wanted, strict=False)
    )
    shares = {"saved": saved_bytes / all_bytes, "calls": calls}
    return {"error": "", **shares, "frozen": frozen, "missing": missing, "same": same}


def _net() -> torch.nn.Module:
    """Return a net of two layers with always the same weights."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
            self.layer2 = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH))

        def forward(self, inputs: Any) -> Any:
            return self.layer2(self.layer1(inputs))

    with seeded():
        return Net()


def _step(net: Any) -> tuple[list[torch.Tensor | None], int]:
    """Return the gradients of a forward and backward, and the bytes that forward kept for backward."""
    weights = list(net.parameters())
    known, kept_bytes = {id(one) for one in weights}, 0

    def keep(saved: torch.Tensor) -> torch.Tensor:
        nonlocal kept_bytes
        kept_bytes += 0 if id(saved) in known or saved.is_leaf else saved.nbytes
        return saved

    inputs = torch.linspace(-1, 1, _SAMPLES * _WIDTH).reshape(_SAMPLES, _WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        loss = net(inputs).square().mean()
    loss.backward()
    return [one.grad for one in weights], kept_bytes
