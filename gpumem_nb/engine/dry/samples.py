"""A look at somebody's samples: the smallest and the largest of those that were seen."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from ...shared.errors import WorkloadError, text_of
from ...shared.seeds import DEFAULT_SEED
from ..data.handed import Handed, check_repeatable
from ..data.once import samples_at
from ..data.shapes import size

_LOOKED_AT, _LOOKED_AT_S = 64, 5.0
"""So many samples, or as many as that time allows."""


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
            found = size(sample)
            smallest, least = (sample, found) if found < least else (smallest, least)
            largest, most = (sample, found) if found > most else (largest, most)
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
