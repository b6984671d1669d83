"""Handwritten digits: the 1,797 images that ship inside scikit-learn, and a small residual network for them.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import math
from importlib.metadata import distribution

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, relu
from torch.utils.data import Dataset

CLASSES = 10
TEST_SAMPLES = 297
_SIDE = 8
_LARGEST_PIXEL = 16.0


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Images of digits with their labels, 1,500 to train on or the 297 held out; the split is always the same.

    A sample is a float32 image of shape [1, resolution, resolution] with values from -1 to 1, and its label. The
    images are kept as numpy arrays, in their original size, so that the dataset itself takes no (virtual) GPU memory.
    """

    def __init__(self, resolution: int, train: bool = True) -> None:
        pixels, labels = _read()
        order = np.random.RandomState(0).permutation(len(labels))
        by_class = order[np.argsort(labels[order], kind="stable")]
        held_out = by_class[np.linspace(0, len(order) - 1, TEST_SAMPLES).astype(int)]  # of each class as many as it has
        chosen = np.setdiff1d(order, held_out) if train else held_out
        images = pixels[chosen].reshape(-1, _SIDE, _SIDE)
        self._images = (images / (_LARGEST_PIXEL / 2) - 1).astype(np.float32)
        self._labels = labels[chosen]
        self._enlarge = _bilinear(resolution)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._enlarge @ self._images[index] @ self._enlarge.T
        return torch.from_numpy(image[np.newaxis]), int(self._labels[index])


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Pixels from 0 to 16, a row of 64 for each image, and labels.

    From scikit-learn's file, without importing it: that would take each rank more than a second.
    """
    table = np.loadtxt(
        str(distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")), delimiter=","
    )
    return table[:, :-1], table[:, -1].astype(int)


def _bilinear(resolution: int) -> np.ndarray:
    """Return the matrix that resamples 8 pixels to ``resolution`` as torch's bilinear interpolation does."""
    centres = (np.arange(resolution) + 0.5) * _SIDE / resolution - 0.5
    pixels = np.eye(_SIDE, dtype=np.float32)
    return np.stack([np.interp(centres, np.arange(_SIDE), row) for row in pixels], axis=1).astype(np.float32)


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
