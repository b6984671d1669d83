"""Micro-batches of any size without their memory: shapes that follow from three small ones, which are there whole."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ...shared.errors import WorkloadError, text_of
from ...shared.units import DEFAULT_SEED
from ..data.fetching import to_device
from ..data.handed import Handed, check_repeatable, collated_copies, do_not_go_together, handed_over, rows, samples_at
from ..data.sizes import shapes, size

_LOOKED_AT, _LOOKED_AT_S = 64, 5.0
"""So many samples, or as many as that time allows."""


def looked_at(handed: Handed) -> tuple[Any, Any, Any]:
    """The smallest and the largest of some samples, or of some micro-batches that the data brings; and the worst one.

    Where one sample has the longest text and another the largest image, a micro-batch is padded to both: the worst
    sample is the largest with whatever parts others have larger. Micro-batches that the data brings stay whole, because
    their parts have as many rows.

    Raises:
        WorkloadError: there is none, or one cannot be taken.
    """
    until_s = time.monotonic() + _LOOKED_AT_S
    smallest = largest = widest = None
    least, most = (math.inf, ""), (-1.0, "")
    try:
        for sample in _some(handed):
            found = size(sample)
            smallest, least = (sample, found) if found < least else (smallest, least)
            widest = sample if largest is None or handed.info.batched else with_larger_parts(widest, sample)
            largest, most = (sample, found) if found > most else (largest, most)
            if time.monotonic() > until_s:
                break
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"A sample of the data cannot be taken ({type(error).__name__}: {text_of(error)}). Fix the dataset, or "
            "give one of random tensors of the same shapes."
        ) from None
    if most[0] < 0:
        raise WorkloadError("The data is empty. Give it at least one sample.")
    return smallest, largest, largest if handed.info.batched else with_larger_parts(largest, widest)


def with_larger_parts(sample: Any, other: Any) -> Any:
    """Return the sample with those parts of another one that are larger, if both are built alike."""
    if type(sample) is type(other) is dict and sample.keys() == other.keys():
        return {name: with_larger_parts(part, other[name]) for name, part in sample.items()}
    if type(sample) is type(other) and isinstance(sample, list | tuple) and len(sample) == len(other):
        parts = [with_larger_parts(*both) for both in zip(sample, other, strict=True)]
        return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)
    return other if size(other)[0] > size(sample)[0] else sample


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


_SMALL = (2, 4, 8)
"""Samples of the three: even numbers, because some collate functions mix pairs."""

Parts = Sequence[Any]
"""What stands in the same place of the three."""


class Batches:
    """The micro-batches of the data that was handed over.

    All are made of one sample, which has the largest parts that were seen, so that nothing but the number of samples
    changes.

    Args:
        data: what ``Workload.data`` returns (see :class:`gpumem_nb.shared.workload.Workload`), or that as it was handed
            over.

    Attributes:
        info: how the data was handed over, with the size of micro-batches that it brings.
        varies: whether samples are of different sizes after they were collated too.

    Raises:
        WorkloadError: ranks would not take it, no sample can be taken from it, or no batch be made.
    """

    def __init__(self, data: Any) -> None:
        handed = data if isinstance(data, Handed) else handed_over(data)
        self.info = handed.info
        self._apart: WorkloadError | None = None  # why samples do not go together
        smallest, largest, worst = looked_at(handed)
        if handed.info.batched:
            self.info = dataclasses.replace(handed.info, batch_size=rows(largest))
            self._small = [_collated(handed, [largest])] * len(_SMALL)
            self.varies = shapes(smallest) != shapes(largest)
            return
        sample = worst
        try:
            self._small = [_collated(handed, [sample] * size) for size in _SMALL]
        except WorkloadError:  # parts of several samples need not go together
            sample = largest
            self._small = [_collated(handed, [sample] * size) for size in _SMALL]
        # What is padded to one length, or brought to one size, is no different.
        self.varies = shapes(_collated(handed, [smallest] * _SMALL[0])) != shapes(self._small[0])
        try:
            _collated(handed, [smallest, largest])
        except WorkloadError as error:
            self._apart, self._small = error, [_collated(handed, [sample])] * len(_SMALL)

    @property
    def fixed(self) -> bool:
        """Return whether there are batches of no other size than the data's own, or of one sample."""
        return self.info.batched or self._apart is not None

    def of(self, size: int) -> Any:
        """Return a micro-batch of so many samples; of its own size, if the data brings micro-batches.

        Raises:
            WorkloadError: what it would be cannot be told, or samples do not go together.
        """
        if self._apart and size > 1:
            raise self._apart
        return _like(self._small, size)

    def real(self, size: int) -> Any:
        """Return such a micro-batch, small or the only one, with its values: a model may ask for them, say for lengths.

        Raises:
            WorkloadError: samples do not go together.
        """
        if self._apart and size > 1:
            raise self._apart
        made = self._small[_SMALL.index(size) if size in _SMALL else 0]
        return to_device(made, torch.device("cpu"), copy=True)


def _collated(handed: Handed, samples: Sequence[Any]) -> Any:
    try:
        return collated_copies(handed.collate, samples)
    except Exception as error:
        if handed.collate is default_collate:
            raise WorkloadError(do_not_go_together(error)) from None
        raise WorkloadError(
            f"collate_fn cannot make a batch of {len(samples)} samples ({type(error).__name__}: {text_of(error)}). "
            "Fix it, or start ranks (%hvd_start) and predict there."
        ) from None


def _like(parts: Parts, size: int) -> Any:
    """Return what stands in this place of a batch of ``size`` samples: ids and labels of 0 are allowed everywhere."""
    first = parts[0]
    if isinstance(first, Tensor):
        if first.layout is not torch.strided:
            raise WorkloadError(_no_idea(f"tensor of layout {first.layout}", size))
        return torch.zeros(_shape(parts, size), dtype=first.dtype)
    if isinstance(first, np.ndarray):
        return np.zeros(_shape(parts, size), dtype=first.dtype)
    if isinstance(first, Mapping):
        items = {key: _like([part[key] for part in parts], size) for key in first}
        return items if type(first) is dict else _filled(first, items)
    if isinstance(first, list | tuple):
        return _sequence_like(parts, size)
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        members = {name: _like([getattr(part, name) for part in parts], size) for name in names}
        return dataclasses.replace(first, **members)  # type: ignore[type-var]
    if type(first) is int:
        return _length(parts, size)
    if shapes(first):
        raise WorkloadError(_no_idea(type(first).__name__, size))
    return first


def _no_idea(what: str, size: int) -> str:
    return (
        f"Micro-batches of the data hold a {what}, and what that would be with {size} samples cannot be told. Let "
        "collate_fn give dense tensors, or lists, tuples, dicts or dataclasses of them, or start ranks (%hvd_start) "
        "and predict there."
    )


def _sequence_like(parts: Parts, size: int) -> Any:
    """Return one entry for each sample, or a few of which each holds all samples."""
    first, lengths = parts[0], [len(part) for part in parts]
    if len(set(lengths)) > 1:
        entries = [_like([part[0] for part in parts], size) for _ in range(_length(lengths, size))]
    else:
        entries = [_like(place, size) for place in zip(*parts, strict=True)]
    return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)


def _shape(parts: Parts, size: int) -> tuple[int, ...]:
    try:
        return tuple(_length(lengths, size) for lengths in zip(*(part.shape for part in parts), strict=True))
    except ValueError:
        raise WorkloadError(_no_line([tuple(part.shape) for part in parts], size)) from None


def _length(lengths: Sequence[int], size: int) -> int:
    """Of one dimension: it stays, or lies on a line."""
    if len(set(lengths)) == 1:
        return lengths[0]
    (small, middle, large), (first, second, third) = lengths, _SMALL

    def line(samples: int) -> int:
        return small + (middle - small) * (samples - first) // (second - first)

    if line(third) != large or line(size) < 0:
        raise WorkloadError(_no_line(lengths, size))
    return line(size)


def _no_line(lengths: Sequence[Any], size: int) -> str:
    counts = ", ".join(map(str, _SMALL))
    return (
        f"Micro-batches of {counts} samples of the data have the lengths {', '.join(map(str, lengths))}, from which "
        f"that of {size} samples cannot be told. Let collate_fn give batches that grow evenly, or start ranks "
        "(%hvd_start) and predict there."
    )


def _filled(mapping: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of a custom class, such as transformers' BatchEncoding, with these items."""
    try:
        return type(mapping)(items)
    except Exception:
        return items
