"""Sizes of samples and micro-batches, whatever they hold; the largest sample decides whether a step fits."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from ...memory.tensors import attributes
from ..random_state import set_aside
from .handed import samples_at

_DEEPEST, _MOST = 5, 100_000
"""So deep, and so many things of one sample, are looked at: it may hold more than its values."""


def shapes(value: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors, arrays and images in a value."""
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
    elif not isinstance(value, type) and (held := attributes(value) or getattr(value, "__dict__", None)):
        for item in held.values():
            yield from _leaves(item, depth + 1)
    else:
        yield value


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    size = getattr(value, "size", None)  # an image of Pillow's
    return size if isinstance(size, tuple) else None


_LOOKED_AT, _LOOKED_AT_S = 4096, 0.3
"""So many samples, or as many as that time allows."""
_MUCH = 2.0  # times as large as the median


class Longest:
    """The largest sample of a map-style dataset, as far as was looked.

    Attributes:
        index: what the order names it by; ``None`` where no sample could be looked at.
        all_seen: whether every sample was looked at.
    """

    def __init__(self, dataset: Any, indices: Sequence[Any]) -> None:
        """Look at as many samples as there is time for, spread over the dataset. Random numbers stay as they are."""
        self.index: Any = None
        self._dataset = dataset
        self._sizes: dict[str, float] = {}
        self._most = -1.0
        places = random.Random(0).sample(range(len(indices)), min(len(indices), _LOOKED_AT))
        self._look((indices[place] for place in places), time.monotonic() + _LOOKED_AT_S)
        few = len(indices) <= _LOOKED_AT  # else their names alone would take a minute and many GB
        self.all_seen = few and len(self._sizes) == len({repr(_plain(index)) for index in indices}) > 0

    @property
    def words(self) -> str:
        """A sentence about it; empty where it is not much larger than others."""
        return self._about(self.index)

    def among(self, indices: Iterable[Any]) -> str:
        """Return a sentence about the largest of these samples; empty where it is not much larger than others."""
        indices = list(indices)
        self._look(indices, time.monotonic() + _LOOKED_AT_S)
        known = [index for index in indices if repr(index) in self._sizes]
        return self._about(max(known, key=lambda index: self._sizes[repr(index)], default=None))

    def _look(self, indices: Iterable[Any], until_s: float) -> None:
        with set_aside():
            for index in map(_plain, indices):
                if time.monotonic() > until_s:
                    return
                try:
                    [sample] = samples_at(self._dataset, [index])
                    found, _ = size(sample)
                except Exception:  # a bad sample is named when its step comes
                    continue
                if found > self._most:
                    self.index, self._most = index, found
                self._sizes[repr(index)] = found

    def _about(self, index: Any) -> str:
        found = self._sizes.get(repr(index), 0.0)
        median = statistics.median(self._sizes.values()) if self._sizes else 0.0
        if not median or found < _MUCH * median:
            return ""
        return (
            f"Sample {index!r} of the data has {found:,.0f} values, {found / median:.0f} × the median sample. "
            "Truncate such samples, put samples of like length together, or cap the tokens of a micro-batch."
        )


def _plain(index: Any) -> Any:
    """Return an index as a dataset is asked for it; orders may hold them in an array."""
    return index.item() if isinstance(index, np.integer) else index
