"""In which order samples are seen: a pure function of seed and epoch, the same on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from ...shared.errors import WorkloadError
from ..random_state import begin_at, set_aside

Order = Callable[[int, int], Sequence[Any]]
"""``order(seed, epoch)`` gives the indices of all samples of an epoch; the same ones whenever it is asked."""


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Every sample once an epoch, each time in another order."""

    length: int

    def __call__(self, seed: int, epoch: int) -> Sequence[Any]:
        """Return the indices of an epoch."""
        # numpy, not torch: on a virtual GPU a torch permutation would count as GPU memory.
        return np.random.default_rng([seed, epoch]).permutation(self.length)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class InTurn:
    """As the dataset has them."""

    length: int

    def __call__(self, seed: int, epoch: int) -> Sequence[Any]:
        """Return the indices of an epoch."""
        return range(self.length)


def of_loader(loader: DataLoader[Any]) -> tuple[Order, tuple[str, ...]]:
    """Return the order that a loader's sampler decides, over the whole dataset, and what is to be said about it.

    Raises:
        WorkloadError: an order that cannot be shared out among the ranks.
    """
    sampler: Any = loader.sampler
    if type(loader.batch_sampler) is BatchSampler:
        sampler = loader.batch_sampler.sampler
    elif loader.batch_sampler is not None:
        raise WorkloadError(
            f"The DataLoader's batch sampler ({type(loader.batch_sampler).__name__}) decides which samples come "
            "together, so it cannot be shared out among the ranks. Give the DataLoader a sampler= and a batch_size=."
        )
    length = len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler and len(sampler) == length:  # else it is one over a part
        return InTurn(length), ()
    if type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement:
        if sampler.num_samples == len(sampler.data_source) == length:
            return Shuffled(length), ()
    elif type(sampler) is DistributedSampler:
        note = "the DistributedSampler's order is used and not its sharding: the toolkit shares samples out by itself"
        return _unsharded(sampler, length), (note,)
    return _Drawn(sampler, loader.generator), ()


def chosen(order: Order) -> Sequence[Any] | None:
    """The indices of which a sampler chose some, or chose them more than once; ``None`` for all of the dataset."""
    return order(0, 0) if isinstance(order, _Drawn) else None


def check(order: Order, seed: int) -> tuple[int, int]:
    """Return the length of an epoch and a checksum of the first one's order.

    Raises:
        WorkloadError: the order changes when it is asked again, or its length from epoch to epoch.
    """
    first = order(seed, 0)
    if not isinstance(order, _Drawn):
        return len(first), _checksum(first)
    if list(order(seed, 0)) != list(first):
        raise WorkloadError(
            f"{order.name} gives another order each time it is asked, with equal random numbers too, so steps could "
            "not be repeated. Let its order follow from torch's random numbers or from a generator= of its own."
        )
    if len(order(seed, 1)) != len(first):
        raise WorkloadError(f"{order.name} gives epochs of different lengths. Let each have as many samples.")
    if not first:
        raise WorkloadError(f"{order.name} gives no sample. Give it at least one for each rank.")
    return len(first), _checksum(first)


class _Drawn:
    """The order that a sampler of any kind gives when random numbers begin from seed and epoch.

    A generator of its own begins from its own seed instead, so that the first epoch is the one that torch would give.
    """

    def __init__(self, sampler: Any, loaders: torch.Generator | None) -> None:
        self.name = f"The DataLoader's sampler ({type(sampler).__name__})"
        self._sampler = sampler
        generator = getattr(sampler, "generator", None)
        self._generator: torch.Generator | None = generator if isinstance(generator, torch.Generator) else None
        self._generator_seed = self._generator.initial_seed() if self._generator else 0
        self._shared = self._generator is not None and self._generator is loaders
        try:
            self._length = len(sampler)
        except TypeError:
            raise WorkloadError(
                f"{self.name} has no length, so it cannot be shared out among the ranks. Give it __len__."
            ) from None

    def __call__(self, seed: int, epoch: int) -> Sequence[Any]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with set_aside(), self._own_generator(epoch):
            begin_at(seed, epoch)
            indices = list(islice(self._sampler, self._length + 1))
        if len(indices) > self._length:
            raise WorkloadError(f"{self.name} gives more than the {self._length} samples that its length promises.")
        return indices

    @contextmanager
    def _own_generator(self, epoch: int) -> Iterator[None]:
        if self._generator is None:
            yield
            return
        before = self._generator.get_state()
        self._generator.manual_seed(self._generator_seed + epoch)
        if self._shared:  # torch's loader draws its workers' seed before the sampler begins
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self._generator)
        try:
            yield
        finally:
            self._generator.set_state(before)


def _unsharded(sampler: DistributedSampler[Any], length: int) -> Order:
    """Return what a distributed sampler has before it takes its share."""
    if not sampler.shuffle:
        return InTurn(length)
    own_seed = sampler.seed

    def order(seed: int, epoch: int) -> Sequence[Any]:
        generator = torch.Generator().manual_seed(own_seed + epoch)
        return torch.randperm(length, generator=generator, device="cpu").numpy()  # type: ignore[return-value]

    return order


def _checksum(indices: Sequence[Any]) -> int:
    return zlib.crc32(indices.tobytes() if isinstance(indices, np.ndarray) else repr(indices).encode())
