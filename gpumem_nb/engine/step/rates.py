"""The learning rates of an optimizer's groups: the knob sets them when it changes, and leaves them alone otherwise."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Rates:
    """The rates of one optimizer. Cells and schedulers change them too, so the knob acts only when *it* changes.

    Until a step was done under a change it can be taken back exactly: going back to the value before puts back the
    rates that there were then.
    """

    def __init__(self, optimizer: Optimizer, knob: float) -> None:
        self._optimizer = optimizer
        self._knob = knob
        self._nonzero = self._now()  # what the proportions of the groups are taken from once a rate is 0
        self._before: tuple[float, list[float]] | None = None

    @property
    def first(self) -> float:
        """The rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def follow(self, knob: float) -> None:
        """Bring the first group to the knob's new value, and scale the rates of the others by the same factor."""
        if knob == self._knob:
            return
        now = self._now()
        if self._before and self._before[0] == knob and len(self._before[1]) == len(now):
            rates, self._before = self._before[1], None
        else:
            rates = self._scaled(now, knob)
            self._before = self._before or (self._knob, now)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            _set(group, rate)
        self._knob = knob

    def settle(self) -> None:
        """A step was done: what was before does not come back."""
        self._before = None

    def _scaled(self, now: list[float], first: float) -> list[float]:
        if now[0]:
            self._nonzero = now
        known = len(self._nonzero) == len(now) and self._nonzero[0] != 0
        base = self._nonzero if known else _initial(self._optimizer)
        if not base[0]:  # nobody knows how the groups relate
            return [first, *now[1:]]
        return [first, *(rate * first / base[0] for rate in base[1:])]

    def _now(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]


def named_rate(optimizer: Optimizer) -> float:
    """The rate that people know an optimizer by: its first group's, or while that is 0 (a warm-up) the one to come."""
    first = float(optimizer.param_groups[0]["lr"])
    return first or _initial(optimizer)[0]


def _initial(optimizer: Optimizer) -> list[float]:
    # Schedulers note in each group what it was made with.
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
