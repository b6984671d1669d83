"""Schedulers that do not go on once a step: by the epoch as Lightning has them, for each process as accelerate has."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class Paced(LRScheduler):
    """A scheduler that goes on once in so many steps (each epoch, say), or several times in each.

    Several times as accelerate does it: one that knows its end, as ``OneCycleLR`` does, stays there.
    """

    def __init__(self, inner: LRScheduler, steps: int = 1, times: int = 1) -> None:
        # Not torch's: that would set the rate of the first step once more.
        self.optimizer, self.inner, self.steps, self.times, self.done = inner.optimizer, inner, steps, times, 0

    def step(self, epoch: int | None = None) -> None:
        """A step was done."""
        self.done += 1
        if self.done % self.steps == 0:
            for _ in range(self.times):
                if self.times == 1 or not self._ended():
                    self.inner.step()

    def _ended(self) -> bool:
        return hasattr(self.inner, "total_steps") and self.inner.last_epoch >= self.inner.total_steps

    def get_last_lr(self) -> list[Any]:
        """Return the rates that it set last."""
        return list(self.inner.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""
        return {"done": self.done, "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; a file holds plain dicts, and some schedulers count in a ``Counter``."""
        kept, known = state_dict["inner"], vars(self.inner)
        counted = {name: Counter(kept[name]) for name in kept if isinstance(known.get(name), Counter)}
        self.done = state_dict["done"]
        self.inner.load_state_dict({**kept, **counted})
