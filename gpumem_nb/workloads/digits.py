"""Handwritten digits: the 1,797 images that ship inside scikit-learn.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

from importlib.metadata import distribution

import numpy as np
import torch
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
