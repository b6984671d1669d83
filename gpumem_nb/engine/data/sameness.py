"""A check that all ranks hold the same data, by its length, its order, and a few of its samples."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...shared.errors import WorkloadError, text_of
from ..copies import quick_checksum
from ..link.communicator import here
from ..random_state import RandomState, begin_at, set_aside
from . import orders
from .handed import Collate, collated_copies, rows, samples_at
from .held_out import HeldOut
from .iterables import IterableStream
from .sizes import shapes, size
from .stream import ShardedStream, Stream

_LOOKED_AT = 5  # samples, spread over the dataset
_DEFINE_ALIKE = "Define the data in the same way on all ranks; what is random in it needs a seed."
_UNSTEADY = (
    "the data gives other samples each time it is asked, with equal random numbers too, so it cannot be checked that "
    "all ranks hold the same, and a step that was undone does not find its samples again"
)


_UNSTEADY_PASS = (
    "each pass over the data gives other samples, with equal random numbers too, so it cannot be checked that all "
    "ranks hold the same, and after a failed read, a resume or a restart some samples come again and others not. Let "
    "the data have a set_epoch(n), and shuffle by that number"
)


class Look(NamedTuple):
    """A summary of one rank's data, in numbers that can be compared."""

    length: int
    order: int
    digest: int
    steady: int
    draws: int
    keeps: int
    varies: int


def look_at(stream: Stream) -> Look:
    """Look at a rank's data. A few samples of a dataset are fetched twice; an iterable is begun once.

    Raises:
        WorkloadError: it is empty, smaller than the number of ranks, none of its samples can be fetched, or its order
            cannot be shared out. What an iterable raises comes as it is.
    """
    if isinstance(stream, IterableStream):
        return _look_at_items(stream)
    assert isinstance(stream, ShardedStream)
    length, order = orders.check(stream.order, stream.seed)
    if length < stream.size:
        raise WorkloadError(f"The dataset has {length} samples, fewer than the {stream.size} ranks.")
    first = stream.order(stream.seed, 0)
    indices = [int(first[place]) if isinstance(first, np.ndarray) else first[place] for place in _places(length)]
    with set_aside():
        samples, digest, draws = _fetched(stream.dataset, indices)
        _, again, draws_again = _fetched(stream.dataset, indices)
        collating_draws, alike = _collated_twice(stream.collate, samples)
        varies = _collated_vary(stream.collate, samples)
    _take_batch_size(stream, samples)
    keeps = draws and not draws_again  # what it drew when a sample was first read
    return Look(length, order, digest, digest == again and alike, draws or collating_draws, keeps, varies)


def digest_of(held_out: HeldOut | None) -> int:
    """Return a checksum of a few of the samples to validate on; 0 for none, and for those that cannot be compared.

    That is where samples differ each time they are asked for, or cannot be fetched, which an evaluation will say.
    """
    if not held_out:
        return 0
    with set_aside():
        try:
            _, digest, _ = _fetched(held_out.dataset, _places(len(held_out)))
            _, again, _ = _fetched(held_out.dataset, _places(len(held_out)))
        except WorkloadError:
            return 0
    return digest if digest == again else 0


def agree(stream: Stream, look: Look) -> None:
    """Compare what the ranks have seen; all of them call it together.

    Raises:
        WorkloadError: they hold different data; raised on all of them.
    """
    looks = here().numbers(look, "looks")
    first = Look(*looks[0])
    for rank, numbers in enumerate(looks):
        other = Look(*numbers)
        if other.length != first.length:
            counts = f"rank 0 has {first.length} samples, rank {rank} has {other.length}"
            raise WorkloadError(f"The ranks hold different data: {counts}. {_DEFINE_ALIKE}")
        if other.order != first.order:
            raise WorkloadError(
                f"The ranks hold different data: the order of samples on rank {rank} is not that on rank 0. Give each "
                "rank a sampler over the whole dataset, with the same seed: the toolkit shares it out."
            )
    seen = [Look(*numbers) for numbers in looks]
    steady = all(other.steady for other in seen)
    if steady and (different := next((rank for rank, other in enumerate(seen) if other.digest != first.digest), 0)):
        what = f"samples on rank {different} are not those on rank 0"
        raise WorkloadError(f"The ranks hold different data: {what}. {_DEFINE_ALIKE}")
    if not steady:
        stream.notes = (*stream.notes, _UNSTEADY_PASS if stream.length is None else _UNSTEADY)
    stream.unsteady = not steady or any(other.keeps for other in seen)
    stream.draws = any(other.draws for other in seen)
    stream.varies = any(other.varies for other in seen)


def _places(length: int) -> list[int]:
    """Return the places of the samples to compare in a dataset of this length."""
    return sorted({place * (length - 1) // (_LOOKED_AT - 1) for place in range(_LOOKED_AT)})


def _look_at_items(stream: IterableStream) -> Look:
    with set_aside():
        items = stream.first_items(_LOOKED_AT)
        if not items:
            raise WorkloadError("The data gave nothing when it was iterated over. Give it at least one sample.")
        draws, _ = _collated_twice(stream.collate, items[:1] if stream.info.batched else items)
        varies = _collated_vary(stream.collate, items) if not stream.info.batched else _vary(items)
        digest, again = _digest(items), _digest(stream.first_items(_LOOKED_AT))
    _take_batch_size(stream, items)
    return Look(0, 0, digest, digest == again, draws, False, varies)


def _fetched(dataset: Any, indices: list[Any]) -> tuple[list[Any], int, bool]:
    """Return the samples that can be fetched, a digest, and whether fetching them draws random numbers."""
    samples: list[Any] = []
    errors: list[Exception] = []
    digest, draws = 0, False
    for index in indices:
        begin_at("look", index)
        before = RandomState.take()
        try:
            found = samples_at(dataset, [index])
        except Exception as error:  # one bad sample is named when its step comes
            errors.append(error)
            found = [f"{type(error).__name__}"]
        else:
            samples += found
        draws = draws or before.moved()
        digest = _digest(found, digest)
    if not samples:
        why = f"sample {indices[0]!r} failed: {type(errors[0]).__name__}: {text_of(errors[0])}"
        raise WorkloadError(f"None of {len(indices)} samples of the data could be fetched; {why}.") from errors[0]
    return samples, digest, draws


def _collated_twice(collate: Collate, samples: list[Any]) -> tuple[bool, bool]:
    """Return whether collating draws random numbers, and whether it gives the same again with equal ones."""
    draws, digests = False, set[int]()
    for _ in range(2):
        begin_at("look", "batch")
        before = RandomState.take()
        try:
            digests.add(_digest(collated_copies(collate, samples)))
        except Exception:  # a step will say it
            return False, True
        draws = draws or before.moved()
    return draws, len(digests) == 1


def _vary(items: list[Any]) -> bool:
    try:
        return len(set(map(size, items))) > 1
    except Exception:  # of a class of the user's
        return False


def _collated_vary(collate: Collate, samples: list[Any]) -> bool:
    """Return whether micro-batches of the smallest and of the largest of these samples have other shapes."""
    try:
        smallest, *_, largest = sorted(samples * 2, key=size)
        if size(smallest) == size(largest):
            return False
        return shapes(collated_copies(collate, [smallest] * 2)) != shapes(collated_copies(collate, [largest] * 2))
    except Exception:  # a step will say it
        return False


def _take_batch_size(stream: Stream, items: list[Any]) -> None:
    """Take the number of samples from a micro-batch that came ready-made, and say where others have another one."""
    if not stream.info.batched or not (size := rows(items[0])):
        return
    stream.info = dataclasses.replace(stream.info, batch_size=size)
    sizes = [found for item in items if (found := rows(item))]
    if max(sizes) > min(sizes):
        counts = (
            f"micro-batches of the data hold {min(sizes)} to {max(sizes)} samples, and samples/s count {size} of each"
        )
        stream.notes = (*stream.notes, counts)


def _digest(value: Any, begun: int = 0) -> int:
    """Return a checksum of what a sample holds; things of unknown kinds count by their class."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return _digest(list(value.unbind()), begun)
        on_host = value.layout is torch.strided and value.device.type == "cpu"
        return zlib.crc32(f"{quick_checksum(value) if on_host else value.shape}".encode(), begun)
    if isinstance(value, np.ndarray):
        head = zlib.crc32(f"{value.dtype}{value.shape}".encode(), begun)
        return head if value.dtype.hasobject else zlib.crc32(np.ascontiguousarray(value).tobytes(), head)
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    if isinstance(value, list | tuple):
        for part in value:
            begun = _digest(part, begun)
        return zlib.crc32(str(len(value)).encode(), begun)
    if value is None or isinstance(value, str | bytes | int | float | complex | np.generic):
        return zlib.crc32(repr(value).encode(), begun)
    content = value.tobytes() if callable(getattr(value, "tobytes", None)) else b""  # such as an image of Pillow's
    return zlib.crc32(content, zlib.crc32(type(value).__name__.encode(), begun))
