"""Sizes of samples and micro-batches, whatever they hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

_DEEPEST, _MOST = 5, 100_000
"""So deep, and so many things of one sample, are looked at: it may hold more than its values."""


def shapes(value: Any) -> list[tuple[int, ...]]:
    """Of the tensors, arrays and images in something."""
    return [shape for leaf in islice(_leaves(value), _MOST) if (shape := _shape(leaf)) is not None]


def size(sample: Any) -> tuple[float, str]:
    """Return what can be compared: elements and letters, and the shapes."""
    leaves = list(islice(_leaves(sample), _MOST))
    found = shapes(leaves)
    others = sum(len(leaf) if isinstance(leaf, str | bytes) else 1 for leaf in leaves)
    return float(sum(map(math.prod, found)) + others), str(found)


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield what is inside of lists, tuples, mappings and objects."""
    if depth > _DEEPEST or _shape(value) is not None:
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, depth + 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for item in vars(value).values():
            yield from _leaves(item, depth + 1)
    else:
        yield value


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    size = getattr(value, "size", None)  # an image of Pillow's
    return size if isinstance(size, tuple) else None
