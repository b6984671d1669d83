"""What an adapter takes of a trainer: parts, first values of knobs, and what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...shared.knobs import KNOBS
from ...shared.workload import Adopted, Taken
from ..step.rates import named_rate


class Taking:
    """Collects what is taken of one trainer.

    Attributes:
        parts: by the roles of ``attach``.
        arguments: what sets a knob in the trainer's own program, by the knob's name.
    """

    def __init__(self, kind: str, arguments: Mapping[str, str]) -> None:
        self.parts: dict[str, Any] = {}
        self.arguments = arguments
        self._kind = kind
        self._knobs: dict[str, Any] = {}
        self._taken: list[Taken] = []
        self._left_out: list[str] = []

    def part(self, role: str, thing: Any, value: str, source: str) -> None:
        """Take a part, unless there is none."""
        if thing is not None:
            self.parts[role] = thing
            self.row(role, value, source)

    def model(self, model: nn.Module, source: str) -> None:
        """Take the model."""
        self.part("model", model, type(model).__name__, source)

    def optimizer(self, optimizer: Optimizer, source: str, rate_from: str) -> None:
        """Take the optimizer and its learning rate."""
        self.part("optimizer", optimizer, type(optimizer).__name__, source)
        self.row("learning_rate", f"{named_rate(optimizer):g}", rate_from)

    def knob(self, name: str, value: Any, source: str) -> None:
        """Let a knob begin with this value."""
        self._knobs[name] = value
        self.row(name, KNOBS[name].text(value), source)

    def constant_rate(self, source: str) -> None:
        """Let the rate be constant, whatever an earlier workload was trained under."""
        self._knobs |= {"warmup_steps": 0, "lr_scaling": "none", "reference_batch": None}
        self.knob("lr_schedule", "constant", source)

    def row(self, what: str, value: str, source: str) -> None:
        """Show something that was taken."""
        self._taken.append(Taken(what, value, source))

    def replaced(self, what: str, value: str, source: str) -> None:
        """Show what was named in place of the trainer's own."""
        self._taken = [one for one in self._taken if one.what != what]
        self.row(what, value, source)

    def leave(self, sentence: str) -> None:
        """Name something that is not kept."""
        self._left_out.append(sentence)

    def adopted(self) -> Adopted:
        """Return what is told of it."""
        return Adopted(
            self._kind,
            tuple(self._knobs.items()),
            tuple(self._taken),
            tuple(self._left_out),
            tuple(self.arguments.items()),
        )


def named(thing: Any) -> str:
    """Return what people call a function or an object of theirs."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def length_of(data: Any) -> str:
    """Return how many samples a dataset has, in words."""
    try:
        return f"{len(data):,} samples"
    except TypeError:
        return f"{type(data).__name__}, which can only be iterated"
