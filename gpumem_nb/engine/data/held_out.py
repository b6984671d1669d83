"""What somebody handed over to validate on, as a dataset of which each sample is seen once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from ...shared.errors import WorkloadError


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A map-style dataset and how its samples are collated."""

    dataset: Any
    collate: Callable[[list[Any]], Any]

    def __len__(self) -> int:
        return len(self.dataset)


def as_held_out(data: Any) -> HeldOut:
    """The samples of ``data`` in its dataset's order; a ``DataLoader`` brings its subset and how it collates.

    Raises:
        WorkloadError: it has no length, cannot be indexed, is empty, or its loader makes batches in a way of its own.
    """
    collate: Callable[[list[Any]], Any] = default_collate
    if isinstance(data, DataLoader):
        data, collate = _samples_of(data), data.collate_fn
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise WorkloadError(
            f"The validation data ({type(data).__name__}) cannot be shared out among the ranks. Give eval_data a "
            "dataset with __len__ and __getitem__ (a map-style dataset)."
        )
    if len(data) < 1:
        raise WorkloadError("The validation data is empty. Give eval_data at least one sample.")
    return HeldOut(data, collate)


def _samples_of(loader: DataLoader[Any]) -> Any:
    """The dataset of a loader, or the part of it that its sampler is restricted to."""
    dataset, batches = loader.dataset, loader.batch_sampler
    if isinstance(dataset, IterableDataset):
        return dataset
    if type(batches) is not BatchSampler:
        raise WorkloadError(
            "The validation data's DataLoader makes batches in a way of its own, and each sample is seen exactly once. "
            "Give eval_data its dataset, or a DataLoader with a batch_size."
        )
    sampler = batches.sampler
    if type(sampler) is SubsetRandomSampler:
        return Subset(dataset, sorted(int(index) for index in sampler.indices))
    in_order = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if in_order and len(sampler) == len(dataset):  # type: ignore[arg-type]
        return dataset
    raise WorkloadError(
        f"The sampler of the validation data ({type(sampler).__name__}) cannot be used, because each sample is seen "
        "exactly once. Give eval_data the dataset itself, or a part of it: torch.utils.data.Subset(dataset, indices)."
    )
