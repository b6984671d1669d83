"""The ready-made workloads by name, with their options. Importing it imports no torch, so the kernel can list them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..shared.errors import InvalidInput, nearest
from ..shared.workload import Workload
from . import recipes

Number = int | float


@dataclass(frozen=True, slots=True)
class Option:
    """One number that sizes a workload.

    Attributes:
        help: one line for people.
        default: the value when nothing is said; its type says whether fractions are allowed.
        low, high: the smallest and the largest value.
    """

    help: str
    default: Number
    low: Number
    high: Number

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        kind = "whole number" if isinstance(self.default, int) else "number"
        return f"a {kind} from {self.low} to {self.high}"

    def check(self, name: str, value: Any) -> Number:
        """``value``, a number or text as a magic passes it, as a number; ``InvalidInput`` says what is allowed."""
        try:
            number = self._parse(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or not self.low <= number <= self.high:
            raise InvalidInput(f"{name}={value!r} cannot be used: it must be {self.allowed}.")
        return number

    def _parse(self, value: Any) -> Number:
        if isinstance(value, bool):
            raise ValueError(value)
        if isinstance(self.default, float):
            return float(value)
        if isinstance(value, float) and not value.is_integer():
            raise ValueError(value)
        return int(value)


@dataclass(frozen=True, slots=True)
class Entry:
    """One ready-made workload.

    Attributes:
        name: what ``%hvd_load`` calls it.
        help: one line for people.
        task: what it learns and how it is scored: ``digits`` or ``text``.
        options: what can be sized, by name.
        build: makes the workload from its name and a value for every option.
    """

    name: str
    help: str
    task: str
    options: Mapping[str, Option]
    build: Callable[[str, Mapping[str, Any]], Workload]

    def values(self, given: Mapping[str, Any]) -> dict[str, Number]:
        """Return a value for every option: the given ones checked, the others by default. Raises ``InvalidInput``."""
        for name in given:
            if name not in self.options:
                raise InvalidInput(f"{self.name} has no option {name!r}: {nearest(name, self.options)}.")
        return {name: option.check(name, given.get(name, option.default)) for name, option in self.options.items()}


_DIGITS_OPTIONS = {
    "width": Option("channels of the first stage; the second has twice as many", 16, 1, 4096),
    "depth": Option("residual blocks per stage, of two stages", 6, 1, 512),
    "resolution": Option("height and width in pixels that the 8 × 8 images are enlarged to", 16, 8, 1024),
}
_TEXT_OPTIONS = {
    "width": Option("features of a character; a multiple of heads", 64, 1, 16384),
    "depth": Option("transformer blocks", 6, 1, 512),
    "heads": Option("attention heads in a block", 4, 1, 256),
    "sequence_length": Option("characters in one sample", 64, 1, 16384),
    "dropout": Option("share of activations dropped in training", 0.0, 0.0, 0.9),
}

CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "digits-resnet",
            "handwritten digits (scikit-learn's 8 × 8 images) with a small residual network",
            "digits",
            _DIGITS_OPTIONS,
            recipes.digits_resnet,
        ),
        Entry(
            "digits-separable",
            "the same digits and network with depthwise-separable convolutions: fewer parameters, more activations",
            "digits",
            _DIGITS_OPTIONS,
            recipes.digits_separable,
        ),
        Entry(
            "text-gpt",
            "English text (Python's own help topics), character by character, with a small GPT",
            "text",
            _TEXT_OPTIONS,
            recipes.text_gpt,
        ),
    )
}


def find(name: str) -> Entry:
    """Return the entry called ``name``, or ``InvalidInput`` naming the nearest one."""
    if name not in CATALOG:
        raise InvalidInput(f"There is no workload {name!r}: {nearest(str(name), CATALOG)}.")
    return CATALOG[name]


def make(name: str, **options: Any) -> Workload:
    """Return the workload called ``name``, sized by ``options``; unknown names and values raise ``InvalidInput``."""
    entry = find(name)
    return entry.build(name, entry.values(options))
