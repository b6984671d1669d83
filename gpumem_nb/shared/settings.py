"""Settings: all knobs together, immutable, validated on the way in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import InvalidInput, nearest


@dataclass(frozen=True, slots=True)
class Knob:
    """What one knob accepts, in a form that the parser, the completer and the panel all read.

    Attributes:
        help: one line for people.
        choices: the allowed words, empty for a number.
        parse: turns a number given as text or value into the stored value, or raises ``ValueError``.
        allowed: the allowed values in words, for the error message.
    """

    help: str
    choices: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    allowed: str = ""

    def check(self, name: str, value: Any) -> Any:
        """The value to store for ``value``, or ``InvalidInput`` saying what is allowed."""
        if self.choices:
            if value not in self.choices:
                raise InvalidInput(f"{name}={value!r} is not known: {nearest(str(value), self.choices)}.")
            return value
        assert self.parse is not None
        try:
            return self.parse(value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(f"{name}={value!r} cannot be used: it must be {self.allowed}.") from None


def whole(value: Any) -> int:
    """A whole number of at least 1; what is larger than 2**31 is a slip."""
    number = int(value)
    if isinstance(value, bool) or number != float(value) or not 1 <= number <= 2**31:
        raise ValueError(value)
    return number


def positive(value: Any) -> float:
    """A finite number above 0."""
    number = float(value)
    if isinstance(value, bool) or not 0 < number < float("inf"):
        raise ValueError(value)
    return number


def positive_or(word: str) -> Callable[[Any], float | None]:
    """A finite number above 0, or ``None``, which people write as ``word``."""
    return lambda value: None if value is None or str(value).lower() == word else positive(value)


KNOBS: dict[str, Knob] = {
    "precision": Knob(
        "arithmetic of forward and backward: fp32, or autocast to fp16 (with loss scaling) or bf16",
        choices=("fp32", "fp16", "bf16"),
    ),
    "checkpointing": Knob(
        "activation checkpointing: keep all activations, or recompute them per block, per √n blocks, or all at once",
        choices=("none", "blocks", "sqrt", "all"),
    ),
    "batch_size": Knob(
        "samples in one micro-batch on one rank", parse=whole, allowed="a whole number of at least 1, such as 32"
    ),
    "accumulation_steps": Knob(
        "micro-batches per optimizer step", parse=whole, allowed="a whole number of at least 1, such as 4"
    ),
    "optimizer": Knob(
        "update rule; 'own' is the optimizer that the workload brings",
        choices=("sgd", "momentum", "adam", "adamw", "own"),
    ),
    "optimizer_impl": Knob(
        "how torch computes the update: its default, foreach (fast, one extra copy), fused, or a plain loop",
        choices=("default", "foreach", "fused", "loop"),
    ),
    "learning_rate": Knob("step size of the update", parse=positive, allowed="a number above 0, such as 1e-3"),
    "clip_norm": Knob(
        "largest allowed 2-norm of all gradients together, or none",
        parse=positive_or("none"),
        allowed="a number above 0, such as 1.0, or none",
    ),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be switched between two steps.

    ``batch_size`` counts samples of one micro-batch on one rank; the global batch is
    ``batch_size × accumulation_steps × ranks``. ``learning_rate`` and ``clip_norm`` are plain numbers
    (``clip_norm=None`` switches clipping off).
    """

    precision: str = "fp32"
    checkpointing: str = "none"
    batch_size: int = 32
    accumulation_steps: int = 1
    optimizer: str = "adamw"
    optimizer_impl: str = "default"
    learning_rate: float = 1e-3
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name, knob in KNOBS.items():
            object.__setattr__(self, name, knob.check(name, getattr(self, name)))

    def replace(self, **knobs: Any) -> Settings:
        """A copy with some knobs changed; unknown names and values raise ``InvalidInput`` naming the nearest one."""
        for name in knobs:
            if name not in KNOBS:
                raise InvalidInput(f"There is no knob {name!r}: {nearest(name, KNOBS)}.")
        return dataclasses.replace(self, **knobs)

    def changed_from(self, other: Settings) -> dict[str, Any]:
        """The knobs whose value differs from ``other``, with the value they have here."""
        return {name: getattr(self, name) for name in KNOBS if getattr(self, name) != getattr(other, name)}

    @property
    def samples_per_rank(self) -> int:
        """Samples one rank sees in one optimizer step."""
        return self.batch_size * self.accumulation_steps

    def __str__(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in KNOBS)


assert tuple(field.name for field in dataclasses.fields(Settings)) == tuple(KNOBS)
