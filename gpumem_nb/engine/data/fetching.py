"""Samples of a dataset, made a batch, in the rank or in a worker; and the way of a batch to the device."""

from __future__ import annotations

from collections import UserDict, UserList, deque
from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ...memory.tensors import attributes
from ...shared.errors import WorkloadError, text_of
from ..link.communicator import here
from ..random_state import begin_at, set_aside
from .handed import Collate, do_not_go_together, samples_at


def no_fault_of_a_sample(error: Exception) -> bool:
    """Return whether what was raised while samples were read is lack of memory, or of other ranks."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or here().is_separation(error)


class FromWorker(Exception):
    """An exception of a worker, as text."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task of a worker: fetch the samples with ``indices``, for the places of the stream from ``place`` on."""

    place: int
    indices: Sequence[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Fetcher:
    """Fetches and collates.

    Attributes:
        dataset: map-style.
        collate: makes a batch of a list of samples.
        seed: if samples or batches draw random numbers, those of each begin from this seed and its place, so that they
            depend neither on who fetches it nor on what was fetched before; ``None`` where nothing is drawn.
        skip: go on without samples that cannot be fetched.
    """

    dataset: Any
    collate: Collate
    seed: int | None = None
    skip: bool = False

    def batch(self, task: Task) -> tuple[Any, tuple[str, ...]]:
        """Return the batch, and a sentence for each sample that is missing in it.

        Raises:
            WorkloadError: a sample cannot be fetched, or samples do not go together. What a ``collate_fn`` raises comes
                as it is, and so does what is raised for lack of memory.
        """
        if self.seed is None:
            return self._batch(task)
        with set_aside():
            return self._batch(task)

    def _batch(self, task: Task) -> tuple[Any, tuple[str, ...]]:
        samples, bad = self._samples(task)
        if self.seed is not None:
            begin_at(self.seed, task.place, "batch")
        return collated(self.collate, samples), tuple(bad)

    def _samples(self, task: Task) -> tuple[list[Any], list[str]]:
        together = self.seed is None and hasattr(self.dataset, "__getitems__")
        if not together:
            return self._one_by_one(task)
        try:
            return samples_at(self.dataset, list(task.indices)), []
        except Exception as error:
            if no_fault_of_a_sample(error):
                raise
            samples, bad = self._one_by_one(task)  # which of them was it?
            if not bad:
                raise
            return samples, bad

    def _one_by_one(self, task: Task) -> tuple[list[Any], list[str]]:
        samples: list[Any] = []
        bad: list[str] = []
        in_tables = hasattr(self.dataset, "__getitems__")
        for offset, index in enumerate(task.indices):
            if self.seed is not None:
                begin_at(self.seed, task.place + offset)
            try:
                samples += samples_at(self.dataset, [index]) if in_tables else (self.dataset[index],)
            except Exception as error:
                if no_fault_of_a_sample(error):
                    raise
                bad.append(f"sample {index!r} of the data failed: {type(error).__name__}: {text_of(error)}")
                if not self.skip:
                    raise WorkloadError(f"{bad[0]}. Fix it, or go on without it: on_bad_sample=skip.") from error
        if not samples:
            raise WorkloadError(f"No sample of a micro-batch could be fetched{'; '.join(['', *bad[:1]])}.")
        return samples, bad


def collated(collate: Collate, samples: list[Any]) -> Any:
    """Return a batch of samples. An exception of the user's own ``collate_fn`` is not changed.

    Raises:
        WorkloadError: torch's own cannot make a batch of them.
    """
    if collate is not default_collate:
        return collate(samples)
    try:
        return default_collate(samples)
    except Exception as error:
        if no_fault_of_a_sample(error):
            raise
        raise WorkloadError(do_not_go_together(error)) from error


def to_device(batch: Any, device: torch.device, copy: bool = False) -> Any:
    """Return the batch with every tensor in it on the device, in containers of the same types.

    Looks into mappings, lists, tuples and data classes, however nested; an object with a method ``to`` moves itself.
    The containers of ``batch`` itself stay as they are.

    Args:
        batch: what a data set or a loader gave.
        device: where its tensors go.
        copy: copy a tensor even if it is on the device already: a real GPU would hold a copy of what the dataset or
            another process holds, and a virtual one does not count what another process has shared.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True, copy=copy)
    if type(batch) is dict:
        return {key: to_device(value, device, copy) for key, value in batch.items()}
    # Such as transformers' BatchEncoding, whose own ``to`` changes the batch that the data set may keep.
    if isinstance(batch, dict | UserDict) or (isinstance(batch, Mapping) and (copy or not hasattr(batch, "to"))):
        return _like(batch, {key: to_device(value, device, copy) for key, value in batch.items()})
    if hasattr(batch, "to"):
        return batch.to(device)
    if type(batch) is list:
        return [to_device(value, device, copy) for value in batch]
    if isinstance(batch, tuple):
        moved = [to_device(value, device, copy) for value in batch]
        same = all(new is old for new, old in zip(moved, batch, strict=True))
        return batch if same else tuple.__new__(type(batch), moved)  # a named tuple's own checks may refuse these
    if isinstance(batch, list | deque | UserList):
        filled = shallow_copy(batch)
        for index, value in enumerate(batch):
            filled[index] = to_device(value, device, copy)
        return filled
    if (found := attributes(batch)) is not None:
        changed = shallow_copy(batch)
        for name, value in found.items():
            object.__setattr__(changed, name, to_device(value, device, copy))  # also of a frozen one
        return changed
    return batch


def _like(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Mapping[Any, Any]:
    """``moved`` in a mapping of the type of ``batch``, with what else that has: a default factory, say."""
    if isinstance(batch, MappingProxyType):
        return MappingProxyType(moved)
    if not isinstance(batch, MutableMapping):
        return type(batch)(moved)  # type: ignore[call-arg]
    filled = shallow_copy(batch)
    for key, value in moved.items():
        filled[key] = value
    return filled
