"""What all cases share: a small model and its samples, live bytes at a moment, and gradients to compare with."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...memory.device import opened

Names = dict[str, Any]
"""The variables of the cells of a rank."""
Batch = tuple[Tensor, Tensor]
WIDE = 64
_SETTLED = 4  # steps, before which live bytes may grow: state of optimizers, caches


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Draw what is drawn inside from this seed, and put the random numbers of the cells back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def mlp(wide: int = WIDE, depth: int = 2) -> nn.Sequential:
    """Return a small network on the rank's device; the same each time inside of :func:`seeded`."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(wide, wide), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(wide, wide)).to(opened().torch_device)


def batches(count: int, size: int, wide: int = WIDE) -> list[Batch]:
    """Return micro-batches of inputs and targets."""
    device = opened().torch_device
    return [(torch.randn(size, wide, device=device), torch.randn(size, wide, device=device)) for _ in range(count)]


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (outputs - targets).square().mean()


def live_bytes() -> int:
    """Return what tensors hold now, when garbage is gone."""
    gc.collect()
    return opened().reading().live_bytes


class Growth:
    """By how many bytes live bytes grow from one step to the next: garbage is collected at two moments only.

    Args:
        steps: how many there will be.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._seen, self._settled_bytes, self._last_bytes = steps, 0, 0, 0

    def note(self) -> None:
        """Note that a step was done."""
        self._seen += 1
        if self._seen == _SETTLED:
            self._settled_bytes = live_bytes()
        elif self._seen == self._steps:
            self._last_bytes = live_bytes()

    @property
    def each(self) -> float | None:
        """Bytes for each step, once things have settled; ``None`` where there were more or fewer steps."""
        if self._seen != self._steps:
            return None
        return (self._last_bytes - self._settled_bytes) / (self._steps - _SETTLED)

    def watching(self, data: Sequence[Batch]) -> Iterator[Batch]:
        """Yield micro-batches, each of which is a step, and note when the next one is asked for."""
        for batch in data:
            yield batch
            del batch
            self.note()


def peak_of(call: Callable[[], object]) -> int:
    """Return by how many bytes the live peak of a call is above what is live before it."""
    before = live_bytes()
    opened().reset_peak()
    call()
    return opened().reading().live_peak_bytes - before


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers of some tensors, behind each other."""
    return torch.cat([one.detach().reshape(-1) for one in tensors])


def off(found: Tensor, expected: Tensor) -> float:
    """Return how far numbers are from those expected, as a share of these; infinite where a shape is another one."""
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


def numbers(values: object) -> list[float] | None:
    """Return some values as numbers; ``None`` where they are not."""
    try:
        return [float(value) for value in values]  # type: ignore[attr-defined]
    except (TypeError, ValueError, RuntimeError):
        return None


def whole_segments() -> list[Tensor]:
    """Give the cache back, and fill the pieces of segments that are in use: while the result is held, none is left."""
    device = opened()
    device.empty_cache()
    plugs = list[Tensor]()
    for mib in (16, 8, 4, 2):
        while True:
            reserved = device.reading().reserved_bytes
            plugs.append(torch.empty(mib * 2**20, dtype=torch.uint8, device=device.torch_device))
            if device.reading().reserved_bytes > reserved:
                plugs.pop()
                device.empty_cache()
                break
    return plugs
