"""The order in which samples are seen, sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from ...shared.errors import WorkloadError
from ...shared.seeds import DEFAULT_SEED


class ShardedStream:
    """An endless stream of samples, cut into steps.

    Every epoch is a fresh permutation of the dataset, and one follows another without a gap: a step that reaches the
    end of an epoch goes on in the next. So each epoch holds each sample exactly once, whatever the batch size and
    however often it changes, and all steps have the same size. One step takes ``size × per_rank`` consecutive places;
    rank r takes the r-th run of ``per_rank`` of them, so splitting a step into other micro-batches moves no sample.

    Attributes:
        seed: of the order; another one counts from the next sample on.
        position: places consumed so far by all ranks together.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], rank: int, size: int, seed: int = DEFAULT_SEED
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.rank = rank
        self.size = size
        self.seed = seed
        self.position = 0
        self.length = len(dataset)
        self._orders: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    @property
    def epoch(self) -> float:
        """Epochs seen so far."""
        return self.position / self.length

    def micro_batches(self, batch_size: int, count: int) -> Iterator[Any]:
        """The ``count`` collated micro-batches of this rank's next step. The position stays until :meth:`advance`."""
        start = self.position + self.rank * batch_size * count
        for index in range(count):
            first = start + index * batch_size
            yield self._fetch(range(first, first + batch_size))

    def advance(self, batch_size: int, count: int) -> None:
        """The step was done: go on behind it."""
        self.position += self.size * batch_size * count

    def _fetch(self, places: range) -> Any:
        indices = [int(self._order(place // self.length)[place % self.length]) for place in places]
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(indices))
        return self.collate([self.dataset[index] for index in indices])

    def _order(self, epoch: int) -> np.ndarray[Any, Any]:
        key = (self.seed, epoch)
        if key not in self._orders:
            # numpy, not torch: on a virtual GPU a torch permutation would count as GPU memory.
            self._orders = {known: order for known, order in self._orders.items() if known == (self.seed, epoch - 1)}
            self._orders[key] = np.random.default_rng([self.seed, epoch]).permutation(self.length)
        return self._orders[key]


def as_dataset(data: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    """The map-style dataset behind ``data`` and how its samples are collated; a ``DataLoader`` brings both."""
    collate: Callable[[list[Any]], Any] = default_collate
    if isinstance(data, DataLoader):
        data, collate = data.dataset, data.collate_fn
    try:
        length = len(data)
    except TypeError:
        raise WorkloadError(
            f"The dataset ({type(data).__name__}) has no length, so it cannot be shared out among the ranks. "
            "Give it __len__ and __getitem__ (a map-style dataset)."
        ) from None
    if not hasattr(data, "__getitem__"):
        raise WorkloadError(f"The dataset ({type(data).__name__}) has no __getitem__. Use a map-style dataset.")
    if length < 1:
        raise WorkloadError("The dataset is empty. Give it at least one sample for each rank.")
    return data, collate


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
