"""Data as the user hands it over: its samples, how they are collated, and their order.

Ranks read it so, and so do dry runs, which have no Horovod.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from ...shared.errors import WorkloadError, text_of
from ...shared.workload import DataInfo
from . import orders
from .orders import Order

Collate = Callable[[list[Any]], Any]

# Options of a DataLoader that say how its workers work.
_HANDED_ON = ("worker_init_fn", "timeout", "multiprocessing_context")
_OF_WORKERS = ("num_workers", "drop_last", "pin_memory", "generator", *_HANDED_ON)


class Columns:
    """A map-style dataset over tensors or arrays of equal length: its samples are their rows.

    Attributes:
        names: of the parts of a row; ``None`` where it is a tuple of them.
    """

    def __init__(self, columns: tuple[Any, ...] | Mapping[str, Any]) -> None:
        named = columns if isinstance(columns, Mapping) else dict(enumerate(columns))
        lengths = {name: len(column) for name, column in named.items()}
        if len(set(lengths.values())) > 1:
            different = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
            raise WorkloadError(f"The parts of the data have different lengths: {different} rows. Give equal ones.")
        self.names = list(named) if isinstance(columns, Mapping) else None
        self._columns = [
            column if isinstance(column, Tensor) else torch.as_tensor(column, device="cpu") for column in named.values()
        ]
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        row = tuple(column[index] for column in self._columns)
        return dict(zip(self.names, row, strict=True)) if self.names is not None else row


@dataclass(frozen=True, slots=True)
class Handed:
    """Data, as it was handed over.

    Attributes:
        dataset: map-style, or an iterable.
        collate: makes a micro-batch of samples; of one that is in a list, if the data brings micro-batches.
        order: of the samples; ``None`` for an iterable.
        info: how it was handed over.
        handed_on: what torch's loader is given besides.
        notes: sentences to be said once.
    """

    dataset: Any
    collate: Collate
    order: Order | None
    info: DataInfo = field(default_factory=DataInfo)
    handed_on: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def handed_over(data: Any) -> Handed:
    """Return the data as it was handed over.

    Raises:
        WorkloadError: it cannot be shared out among the ranks.
    """
    # A loader with an iteration of its own is taken by its word: an iterable of micro-batches.
    if isinstance(data, DataLoader) and type(data).__iter__ is DataLoader.__iter__:
        return _of_loader(data)
    if isinstance(data, IterableDataset):
        return Handed(data, default_collate, None, DataInfo(iterable=True))
    if _can_be_indexed(data) and not isinstance(data, DataLoader):
        dataset = _map_style(data)
        return Handed(dataset, default_collate, orders.Shuffled(len(dataset)), notes=_looks_batched(data))
    if hasattr(data, "__iter__"):
        taken = "each item of the iterable is taken for a micro-batch; single samples come from an IterableDataset"
        return Handed(data, _only, None, DataInfo(iterable=True, batched=True), notes=(taken,))
    raise WorkloadError(
        f"The data ({type(data).__name__}) has neither __len__ and __getitem__ nor __iter__. Use a dataset, a "
        "DataLoader, tensors, or an iterable of batches."
    )


def as_dataset(data: Any) -> tuple[Any, Collate]:
    """Return the map-style dataset behind ``data``, the samples that a sampler chose, and how they are collated.

    Raises:
        WorkloadError: there is none.
    """
    handed = handed_over(data)
    if handed.order is None or handed.info.batched:
        what = "brings micro-batches of its own" if handed.info.batched else "can only be iterated"
        raise WorkloadError(
            f"The data ({type(data).__name__}) {what}. Here a dataset of single samples, with __len__ and __getitem__, "
            "is needed (a map-style dataset)."
        )
    indices = orders.chosen(handed.order)
    return handed.dataset if indices is None else Subset(handed.dataset, indices), handed.collate


def _of_loader(loader: DataLoader[Any]) -> Handed:
    batched = loader.batch_size is None and loader.batch_sampler is None
    # With batch_size=None torch collates single items.
    collate = _Alone(loader.collate_fn) if batched else loader.collate_fn
    size = getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(loader.dataset, IterableDataset):
        unused = ", ".join(f"{name}={value}" for name in _OF_WORKERS if (value := getattr(loader, name)))
        why = f"of the DataLoader is not used: {unused}. Each rank iterates over the data by itself"
        info = DataInfo(batch_size=size, batched=batched, iterable=True)
        return Handed(loader.dataset, collate, None, info, notes=(why,) * bool(unused))
    dataset: Any = loader.dataset
    order, notes = orders.of_loader(loader)
    if loader.drop_last and size and len(dataset) % size:
        notes += ("drop_last=True drops nothing: a step that reaches the end of an epoch goes on in the next one",)
    info = DataInfo(size, loader.num_workers, loader.pin_memory, loader.prefetch_factor, batched=batched)
    firsts = {"batch_size": size, "num_workers": info.num_workers, "prefetch_factor": info.prefetch_factor}
    if said := ", ".join(f"{name}={value}" for name, value in firsts.items() if value):
        notes += (f"{said}, as the DataLoader has it",)
    handed_on = {name: value for name in _HANDED_ON if (value := getattr(loader, name))}
    return Handed(dataset, collate, order, info, handed_on, notes)


def _map_style(data: Any) -> Any:
    """Return the dataset, or one whose samples are the rows of tensors and arrays."""
    named = isinstance(data, Mapping) and all(isinstance(key, str) for key in data)
    columns = tuple(data.values()) if named else data if type(data) is tuple else ()
    fit = [isinstance(column, Tensor | np.ndarray) and column.ndim > 0 for column in columns]
    if columns and all(fit):
        data = Columns(data)
    elif named or any(fit):
        keys = f", under its keys {', '.join(map(repr, data))}" if named else ""
        raise WorkloadError(
            f"The data ({type(data).__name__}) does not hold tensors or arrays alone{keys}. Give tensors or arrays of "
            "equal length, or a list of samples."
        )
    if len(data) < 1:
        raise WorkloadError("The dataset is empty. Give it at least one sample for each rank.")
    return data


def _can_be_indexed(data: Any) -> bool:
    try:
        len(data)
    except TypeError:
        return False
    return hasattr(data, "__getitem__") or hasattr(data, "__getitems__")


def _looks_batched(data: Any) -> tuple[str, ...]:
    """Items of a list are samples; say so where they look like micro-batches."""
    item = data[0] if isinstance(data, list) else None
    parts = list(item.values()) if isinstance(item, Mapping) else list(item) if isinstance(item, list | tuple) else []
    if len(parts) < 2 or not all(isinstance(part, Tensor | np.ndarray) and part.ndim for part in parts):
        return ()
    if len({len(part) for part in parts}) > 1 or all(part.ndim == 1 for part in parts):
        return ()
    return (
        "each item of the list is taken for one sample; if they are micro-batches, hand over "
        "DataLoader(data, batch_size=None)",
    )


def rows(batch: Any) -> int | None:
    """Return how many samples are in a micro-batch that came ready-made; ``None`` where it does not say."""
    if isinstance(batch, Tensor | np.ndarray):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for part in parts if (found := rows(part))), None)


def check_repeatable(data: Any) -> None:
    """Refuse an iterable that passes only once.

    Raises:
        WorkloadError: a second pass could not begin.
    """
    first = iter(data)
    if first is data or first is iter(data):
        raise WorkloadError(
            f"The data ({type(data).__name__}) can be iterated over only once, so a second pass could not begin. "
            "Give an object whose __iter__ begins anew each time, such as an IterableDataset or a DataLoader."
        )


def samples_at(dataset: Any, indices: list[Any]) -> list[Any]:
    """Return the samples with these indices, together where the dataset can do that.

    An index that is a list is one of a micro-batch that the dataset brings, which torch asks for by itself.
    """
    if hasattr(dataset, "__getitems__") and not any(isinstance(index, list) for index in indices):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


def collated_copies(collate: Collate, samples: Sequence[Any]) -> Any:
    """Return a micro-batch of copies, because some collate functions take things out of their samples.

    A sample that cannot be copied goes in itself.
    """
    return collate([_copied(sample) for sample in samples])


def takes_nothing_out(collate: Collate) -> bool:
    """Return whether samples stay as they are, because no code of the user's own makes a micro-batch of them."""
    return collate is default_collate or collate is _only


def may_give_stored(collate: Collate) -> bool:
    """Return whether a micro-batch may hold the dataset's own tensors: torch's own collate function copies them."""
    return collate is not default_collate


def _copied(sample: Any) -> Any:
    try:
        return copy.deepcopy(sample)
    except Exception:
        return sample


def do_not_go_together(error: Exception) -> str:
    """Return why torch's own collate function cannot make a batch of samples, and what to do."""
    said = text_of(error)
    if "equal size" in said:
        return (
            f"The samples of a micro-batch differ in shape ({said}). Pad them in a collate_fn: "
            "data=DataLoader(dataset, batch_size=32, collate_fn=...)."
        )
    return (
        f"Samples cannot be made a batch ({said.splitlines()[0]}). Let the dataset give tensors or numbers, or "
        "give a collate_fn: data=DataLoader(dataset, batch_size=32, collate_fn=...)."
    )


def _only(items: list[Any]) -> Any:
    """Return a micro-batch that came ready-made."""
    (item,) = items
    return item


@dataclass(frozen=True)
class _Alone:
    """A collate function that takes one item and no list, as torch has it for ``batch_size=None``."""

    collate: Callable[[Any], Any]

    def __call__(self, items: list[Any]) -> Any:
        return self.collate(_only(items))
