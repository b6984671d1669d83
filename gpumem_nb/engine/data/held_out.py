"""The validation data as a dataset of which each sample is seen once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Subset

from ...shared.errors import WorkloadError
from .handed import Collate, Columns, as_dataset, samples_at


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A map-style dataset and how its samples are collated.

    ``form`` is how it was handed over: a ``dataset``, a ``loader``, a ``tuple`` or ``dict`` of tensors, or a loader
    whose sampler has ``chosen`` samples.
    """

    dataset: Any
    collate: Collate
    form: str = "dataset"

    def __len__(self) -> int:
        return len(self.dataset)


def as_held_out(data: Any) -> HeldOut:
    """Return the samples of ``data`` in its dataset's order; a ``DataLoader`` brings those that its sampler chose.

    Raises:
        WorkloadError: there is no dataset of single samples behind it, it is empty, or its sampler repeats samples.
    """
    try:
        dataset, collate = as_dataset(data)
    except WorkloadError as error:
        raise WorkloadError(f"eval_data: {error}") from None
    form = "loader" if isinstance(data, DataLoader) else "dataset"
    if isinstance(dataset, Columns):
        form = "tuple" if dataset.names is None else "dict"
    if isinstance(data, DataLoader) and dataset is not data.dataset:
        form = "chosen"
        chosen = sorted(dataset.indices)
        if len(set(chosen)) < len(chosen):
            raise WorkloadError(
                f"The sampler of the validation data ({type(data.sampler).__name__}) chooses samples more than once, "
                "and each is to be seen exactly once. Give eval_data the dataset itself, or a part of it: "
                "torch.utils.data.Subset(dataset, indices)."
            )
        dataset = Subset(data.dataset, chosen)
    return HeldOut(dataset, collate, form)


def batches_once(
    dataset: Any, collate: Callable[[list[Any]], Any], rank: int, size: int, batch_size: int
) -> Iterator[tuple[Any, int]]:
    """This rank's share of a map-style dataset, in the dataset's order: samples ``rank``, ``rank + size``, and so on.

    Ranks get as many samples, or one less: one that gets none yields nothing. What fetching raises comes as it is.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` (``__getitems__`` is used where there is one).
        collate: makes a batch of a list of samples.
        rank, size: of this rank, and of all.
        batch_size: samples in a batch; the last one may have less.

    Yields:
        A batch on the host, and how many samples are in it.
    """
    own = range(rank, len(dataset), size)
    for start in range(0, len(own), batch_size):
        indices = list(own[start : start + batch_size])
        yield collate(samples_at(dataset, indices)), len(indices)
