"""A small residual network for one-channel images."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, relu

_NORM_GROUPS = 8
_CELLS = 4


class ResNet(nn.Module):
    """A stem, two stages of ``depth`` residual blocks and a linear head.

    The second stage has twice the channels at half the resolution. Images [N, 1, H, W] become logits [N, classes].
    The head sees the means of 4 × 4 cells: means of whole images tell digits apart only after long training.
    It normalises with GroupNorm, not BatchNorm: a sample's result then does not depend on the micro-batch it happens
    to be in, so splitting a batch into micro-batches leaves the training as it was.
    """

    def __init__(self, width: int, depth: int, classes: int, separable: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), _norm(width))
        first = [Block(width, width, 1, separable) for _ in range(depth)]
        second = [Block(width if i == 0 else 2 * width, 2 * width, 2 if i == 0 else 1, separable) for i in range(depth)]
        self.blocks = nn.Sequential(*first, *second)
        self.head = nn.Linear(2 * width * _CELLS**2, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes."""
        features: Tensor = self.blocks(relu(self.stem(images)))
        logits: Tensor = self.head(adaptive_avg_pool2d(features, _CELLS).flatten(1))
        return logits


class Block(nn.Module):
    """Two 3 × 3 convolutions added to their input, which is projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, separable: bool) -> None:
        super().__init__()
        convolution = _separable if separable else _plain
        self.first = nn.Sequential(convolution(inputs, outputs, stride), _norm(outputs))
        self.second = nn.Sequential(convolution(outputs, outputs, 1), _norm(outputs))
        changes_shape = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes_shape else nn.Identity()

    def forward(self, features: Tensor) -> Tensor:
        """``features`` [N, C, H, W] with what this block adds, in the block's own shape."""
        residual: Tensor = self.second(relu(self.first(features)))
        return relu(residual + self.shortcut(features))


def _plain(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def _separable(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return a filter for each channel, then a mix of the channels (Chollet 2017, arXiv 1610.02357)."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False),
        nn.Conv2d(inputs, outputs, 1, bias=False),
    )


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(_NORM_GROUPS, channels), channels)
