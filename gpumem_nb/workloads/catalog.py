"""The ready-made workloads by name, with their options. Importing it imports no torch, so the kernel can list them.

torch and the data are imported on the ranks, when a factory runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..shared.errors import InvalidInput, nearest
from ..shared.values import Option
from ..shared.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .digits import Digits, ResNet
    from .text import GPT, Text

Number = int | float


def _number(name: str, help_: str, default: Number, low: Number, high: Number) -> Option:
    """Return an option that sizes a workload; the default's type says whether fractions are allowed."""

    def parse(value: Any) -> Number:
        whole = isinstance(default, int)
        if isinstance(value, bool) or (whole and isinstance(value, float) and not value.is_integer()):
            raise ValueError(value)
        number = int(value) if whole else float(value)
        if not low <= number <= high:
            raise ValueError(value)
        return number

    kind = "whole number" if isinstance(default, int) else "number"
    return Option(name, default, help_, parse=parse, allowed=f"a {kind} from {low} to {high}")


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
        return {name: option.check(given.get(name, option.default)) for name, option in self.options.items()}


def _text(name: str, options: Mapping[str, Any]) -> Workload:
    """Characters with a GPT. Raises ``InvalidInput`` when the width cannot be split into the heads."""
    width, heads = options["width"], options["heads"]
    if width % heads:
        raise InvalidInput(
            f"width={width} cannot be split into heads={heads}: make width a multiple of heads, "
            f"such as {(width // heads + 1) * heads}."
        )
    return Workload(
        name,
        model=partial(_gpt_model, **options),
        data=partial(_text_data, options["sequence_length"]),
        loss=mean_cross_entropy,
        blocks=_blocks,
        eval_data=partial(_text_data, options["sequence_length"], train=False),
    )


def mean_cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy in nats, averaged over the labels of an (inputs, labels) batch.

    In fp32 also under autocast, because a mean over thousands of labels is too coarse in 16 bits.
    """
    from torch.nn.functional import cross_entropy

    inputs, labels = batch
    logits: Tensor = model(inputs)
    return cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def _digits(name: str, options: Mapping[str, Any], separable: bool) -> Workload:
    return Workload(
        name,
        model=partial(_resnet_model, options["width"], options["depth"], separable),
        data=partial(_digits_data, options["resolution"]),
        loss=mean_cross_entropy,
        blocks=_blocks,
        eval_data=partial(_digits_data, options["resolution"], train=False),
        metric=accuracy,
    )


def accuracy(model: nn.Module, batch: Any) -> Tensor:
    """Return the share of the inputs of an (inputs, labels) batch whose largest logit is their label, 0 to 1."""
    inputs, labels = batch
    right: Tensor = model(inputs).argmax(-1) == labels
    return right.double().mean()


def _digits_data(resolution: int, train: bool = True) -> Digits:
    from .digits import Digits

    return Digits(resolution, train)


def _resnet_model(width: int, depth: int, separable: bool) -> ResNet:
    from .digits import CLASSES, ResNet

    return ResNet(width, depth, CLASSES, separable)


def _text_data(sequence_length: int, train: bool = True) -> Text:
    from .text import Text

    return Text(sequence_length, train)


def _gpt_model(width: int, depth: int, heads: int, sequence_length: int, dropout: float) -> GPT:
    from .text import GPT, vocabulary_size

    return GPT(vocabulary_size(), width, depth, heads, sequence_length, dropout)


def _blocks(model: Any) -> list[nn.Module]:
    return list(model.blocks)


_DIGITS_OPTIONS = {
    option.name: option
    for option in (
        _number("width", "channels of the first stage; the second has twice as many", 16, 1, 4096),
        _number("depth", "residual blocks per stage, of two stages", 6, 1, 512),
        _number("resolution", "height and width in pixels that the 8 × 8 images are enlarged to", 16, 8, 1024),
    )
}
_TEXT_OPTIONS = {
    option.name: option
    for option in (
        _number("width", "features of a character; a multiple of heads", 64, 1, 16384),
        _number("depth", "transformer blocks", 6, 1, 512),
        _number("heads", "attention heads in a block", 4, 1, 256),
        _number("sequence_length", "characters in one sample", 64, 1, 16384),
        _number("dropout", "share of activations dropped in training", 0.0, 0.0, 0.9),
    )
}

CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "digits-resnet",
            "handwritten digits (scikit-learn's 8 × 8 images) with a small residual network",
            "digits",
            _DIGITS_OPTIONS,
            partial(_digits, separable=False),
        ),
        Entry(
            "digits-separable",
            "the same digits and network with depthwise-separable convolutions: fewer parameters, more activations",
            "digits",
            _DIGITS_OPTIONS,
            partial(_digits, separable=True),
        ),
        Entry(
            "text-gpt",
            "English text (Python's own help topics), character by character, with a small GPT",
            "text",
            _TEXT_OPTIONS,
            _text,
        ),
    )
}


def find(name: str) -> Entry:
    """Return the entry called ``name``, or ``InvalidInput`` naming the nearest one."""
    if name not in CATALOG:
        raise InvalidInput(
            f"There is no workload {name!r}, nor a variable of that name that holds a Workload: "
            f"{nearest(str(name), CATALOG)}."
        )
    return CATALOG[name]


def make(name: str, /, **options: Any) -> Workload:
    """Return the workload called ``name``, sized by ``options``; unknown names and values raise ``InvalidInput``."""
    entry = find(name)
    return entry.build(name, entry.values(options))
