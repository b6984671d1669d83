"""A look at somebody's samples: the smallest and the largest of those that were seen."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from ...shared.errors import WorkloadError, text_of
from ...shared.seeds import DEFAULT_SEED
from ..data.handed import Handed, check_repeatable
from ..data.once import samples_at

_LOOKED_AT, _LOOKED_AT_S = 64, 5.0
"""So many samples, or as many as that time allows."""
_DEEPEST, _MOST = 5, 100_000
"""So deep, and so many things of one sample, are looked at: it may hold more than its values."""


def looked_at(handed: Handed) -> tuple[Any, Any]:
    """The smallest and the largest of some samples, or of some micro-batches that the data brings.

    Raises:
        WorkloadError: there is none, or one cannot be taken.
    """
    until_s = time.monotonic() + _LOOKED_AT_S
    smallest = largest = None
    least, most = (math.inf, ""), (-1.0, "")
    try:
        for sample in _some(handed):
            size = _size(sample)
            smallest, least = (sample, size) if size < least else (smallest, least)
            largest, most = (sample, size) if size > most else (largest, most)
            if time.monotonic() > until_s:
                break
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"A sample of the data cannot be taken ({type(error).__name__}: {text_of(error)}). Mend the dataset, or "
            "give one of random tensors of the same shapes."
        ) from None
    if most[0] < 0:
        raise WorkloadError("The data is empty. Give it at least one sample.")
    return smallest, largest


def shapes(value: Any) -> list[tuple[int, ...]]:
    """Of the tensors, arrays and images in something."""
    return [shape for leaf in islice(_leaves(value), _MOST) if (shape := _shape(leaf)) is not None]


def _some(handed: Handed) -> Iterator[Any]:
    if handed.order is None:
        check_repeatable(handed.dataset)
        if hasattr(handed.dataset, "set_epoch"):
            handed.dataset.set_epoch(0)
        yield from islice(iter(handed.dataset), _LOOKED_AT)
        return
    indices = handed.order(DEFAULT_SEED, 0)
    some = indices[:: max(1, len(indices) // _LOOKED_AT)][:_LOOKED_AT]
    for index in some.tolist() if isinstance(some, np.ndarray) else some:
        yield samples_at(handed.dataset, [index])[0]


def _size(sample: Any) -> tuple[float, str]:
    """What can be compared: elements and letters, and the shapes."""
    leaves = list(islice(_leaves(sample), _MOST))
    found = shapes(leaves)
    others = sum(len(leaf) if isinstance(leaf, str | bytes) else 1 for leaf in leaves)
    return float(sum(map(math.prod, found)) + others), str(found)


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """What is inside of lists, tuples, mappings and objects."""
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
