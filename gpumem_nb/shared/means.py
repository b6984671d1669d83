"""Sums and means of what users' models give, which may be anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def total(values: Iterable[float]) -> float:
    """The sum, to the last bit. Where ``math.fsum`` raises, as of losses that ran away to both sides, not a number."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value, as :func:`total` sums them."""
    return total(values) / len(values)
