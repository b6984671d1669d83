"""The parts of each ready-made workload. torch and the data are imported on the ranks, when a factory runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..shared.errors import InvalidInput
from ..shared.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .digits import Digits
    from .gpt import GPT
    from .resnet import ResNet
    from .text import Text


def digits_resnet(name: str, options: Mapping[str, Any]) -> Workload:
    """Digits with plain convolutions."""
    return _digits(name, options, separable=False)


def digits_separable(name: str, options: Mapping[str, Any]) -> Workload:
    """Digits with depthwise-separable convolutions."""
    return _digits(name, options, separable=True)


def text_gpt(name: str, options: Mapping[str, Any]) -> Workload:
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
    from .digits import CLASSES
    from .resnet import ResNet

    return ResNet(width, depth, CLASSES, separable)


def _text_data(sequence_length: int, train: bool = True) -> Text:
    from .text import Text

    return Text(sequence_length, train)


def _gpt_model(width: int, depth: int, heads: int, sequence_length: int, dropout: float) -> GPT:
    from .gpt import GPT
    from .text import vocabulary_size

    return GPT(vocabulary_size(), width, depth, heads, sequence_length, dropout)


def _blocks(model: Any) -> list[nn.Module]:
    return list(model.blocks)
