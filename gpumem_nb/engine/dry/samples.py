"""A look at the data's samples: the smallest and the largest of those that were seen, and the largest of each part."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from ...shared.errors import WorkloadError, text_of
from ...shared.units import DEFAULT_SEED
from ..data.handed import Handed, check_repeatable
from ..data.once import samples_at
from ..data.shapes import size

_LOOKED_AT, _LOOKED_AT_S = 64, 5.0
"""So many samples, or as many as that time allows."""


def looked_at(handed: Handed) -> tuple[Any, Any, Any]:
    """The smallest and the largest of some samples, or of some micro-batches that the data brings; and the worst one.

    Where one sample has the longest text and another the largest image, a micro-batch is padded to both: the worst
    sample is the largest with whatever parts others have larger. Micro-batches that the data brings stay whole, because
    their parts have as many rows.

    Raises:
        WorkloadError: there is none, or one cannot be taken.
    """
    until_s = time.monotonic() + _LOOKED_AT_S
    smallest = largest = widest = None
    least, most = (math.inf, ""), (-1.0, "")
    try:
        for sample in _some(handed):
            found = size(sample)
            smallest, least = (sample, found) if found < least else (smallest, least)
            widest = sample if largest is None or handed.info.batched else with_larger_parts(widest, sample)
            largest, most = (sample, found) if found > most else (largest, most)
            if time.monotonic() > until_s:
                break
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"A sample of the data cannot be taken ({type(error).__name__}: {text_of(error)}). Fix the dataset, or "
            "give one of random tensors of the same shapes."
        ) from None
    if most[0] < 0:
        raise WorkloadError("The data is empty. Give it at least one sample.")
    return smallest, largest, largest if handed.info.batched else with_larger_parts(largest, widest)


def with_larger_parts(sample: Any, other: Any) -> Any:
    """Return the sample with those parts of another one that are larger, if both are built alike."""
    if type(sample) is type(other) is dict and sample.keys() == other.keys():
        return {name: with_larger_parts(part, other[name]) for name, part in sample.items()}
    if type(sample) is type(other) and isinstance(sample, list | tuple) and len(sample) == len(other):
        parts = [with_larger_parts(*both) for both in zip(sample, other, strict=True)]
        return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)
    return other if size(other)[0] > size(sample)[0] else sample


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
