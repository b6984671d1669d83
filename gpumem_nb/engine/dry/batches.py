"""Micro-batches of any size without their memory: shapes that follow from two small ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from ...shared.errors import WorkloadError

Make = Callable[[Tensor, tuple[int, ...]], Tensor]
"""A tensor like this one, of this shape."""
_SMALL = (2, 3)


class Batches:
    """The micro-batches of somebody's data.

    Args:
        data: what ``Workload.data`` returns; see :class:`gpumem_nb.shared.workload.Workload`.

    Raises:
        WorkloadError: no sample can be taken from it.
    """

    def __init__(self, data: Any) -> None:
        self.fixed = False
        self.size: int | None = None
        collate: Callable[[list[Any]], Any] = default_collate
        if isinstance(data, DataLoader):
            self.size = data.batch_size
            collate, self.fixed, data = data.collate_fn, data.batch_sampler is None, data.dataset
        elif not hasattr(data, "__getitem__") and not isinstance(data, torch.utils.data.IterableDataset):
            self.fixed = True
        if self.fixed:
            self._small = [next(iter(data))]
            return
        samples = _samples(data, max(_SMALL))
        try:
            self._small = [collate(samples[:size]) for size in _SMALL]
        except Exception as error:
            raise WorkloadError(
                f"Samples of the data cannot be made a batch ({type(error).__name__}: {error}). Give the data with a "
                "collate_fn: DataLoader(dataset, collate_fn=...)."
            ) from None

    def of(self, size: int, make: Make) -> Any:
        """A micro-batch of so many samples."""
        return _like(self._small[0], self._small[-1], size, make)


def _samples(data: Any, count: int) -> list[Any]:
    if isinstance(data, Mapping) or (isinstance(data, tuple) and data and all(map(_is_column, data))):
        named = data if isinstance(data, Mapping) else dict(enumerate(data))
        rows = [{name: torch.as_tensor(column[row]) for name, column in named.items()} for row in range(count)]
        return rows if isinstance(data, Mapping) else [tuple(row.values()) for row in rows]
    try:
        if not hasattr(data, "__getitem__"):
            found = list(islice(iter(data), count))
        else:
            found = [data[index] for index in range(min(count, len(data)))]
    except Exception as error:
        raise WorkloadError(
            f"A sample of the data cannot be taken ({type(error).__name__}: {error}). Mend the dataset, or give one of "
            "random tensors of the same shapes."
        ) from None
    if not found:
        raise WorkloadError("The dataset is empty. Give it at least one sample.")
    return [found[index % len(found)] for index in range(count)]


def _is_column(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _like(small: Any, larger: Any, size: int, make: Make) -> Any:
    """What a batch of ``size`` samples would be."""
    if isinstance(small, Tensor):
        return make(small, tuple(_length(*pair, size) for pair in zip(small.shape, larger.shape, strict=True)))
    if isinstance(small, Mapping):
        items = {key: _like(value, larger[key], size, make) for key, value in small.items()}
        return items if type(small) is dict else _filled(small, items)
    if isinstance(small, tuple) and hasattr(small, "_fields"):
        return type(small)(*(_like(*pair, size, make) for pair in zip(small, larger, strict=True)))
    if isinstance(small, list | tuple):
        return type(small)(_like(*pair, size, make) for pair in zip(small, larger, strict=False))
    return small


def _length(small: int, larger: int, size: int) -> int:
    """Of one dimension: it grows with the batch, or is what the longest sample needs."""
    grows = small != larger and small * _SMALL[1] == larger * _SMALL[0]
    return small * size // _SMALL[0] if grows else max(small, larger)


def _filled(mapping: Any, items: dict[Any, Any]) -> Any:
    """A mapping of somebody's own kind, such as transformers' BatchEncoding, with these items."""
    try:
        return type(mapping)(items)
    except Exception:
        return items
