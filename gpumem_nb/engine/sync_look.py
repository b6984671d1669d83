"""Checks that ranks are in step: checksums of what they hold, and which samples they see.

Of what is loaded, and of the user's own loop by the names of its variables. Of that loop each rank says what it sees
without the others, so that one that is out of step is heard as well.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from ..shared.errors import WorkloadError
from ..shared.questions import MOST_SAMPLES, SeenSamples, SyncLook
from .copies import checksum
from .data.stream import ShardedStream
from .random_state import begin_on_host, set_aside
from .step.step import Looks

if TYPE_CHECKING:
    from .step.trainer import Trainer

_BATCHES = 20  # of data without numbered samples
_PLAIN = (str, bytes, int, float, bool, type(None))


def of_own(model: Any, data: Any) -> SyncLook:
    """Return the same of the user's own loop, as it is now.

    Args:
        model: whose weights and gradients are meant; may be wrapped for data parallelism.
        data: what this rank goes through in an epoch, or ``None``. Its order is asked for, or a few micro-batches are
            read; random numbers are put back.

    Raises:
        WorkloadError: ``model`` is not a module, or ``data`` can be iterated only once.
    """
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"A {type(model).__name__} is not a model: name a torch.nn.Module, such as model=net.")
    params = dict(model.named_parameters())
    grads = {name: param.grad for name, param in params.items() if param.grad is not None}
    samples = None if data is None else _samples(data)
    return SyncLook(_checksums(params), _checksums(dict(model.named_buffers())), _checksums(grads), samples)


def of_loaded(trainer: Trainer) -> SyncLook:
    """Of what is loaded. The gradients are those of a step that is undone, in which all ranks take part.

    Raises:
        WorkloadError: this rank could not take it.
    """
    live, stream, gradients = trainer.live, trainer.stream, dict[str, int]()

    def look() -> None:
        params = live.parts.named_parameters()
        found = _checksums({name: param.grad for name, param in params if param.grad is not None})
        gradients.update(found)

    if failure := trainer.look_into_step(Looks(gradients=look)):
        raise WorkloadError(f"The step whose gradients would be compared could not be taken: {failure.message}")
    samples = None
    if isinstance(stream, ShardedStream):
        numbers, repeats = stream.left_of_epoch(
            live.settings.batch_size, live.settings.accumulation_steps, MOST_SAMPLES
        )
        what = "micro-batches" if stream.info.batched else "samples"
        taken, numbered = _as_numbers(numbers)
        samples = SeenSamples(taken, what, numbered, repeats)
    weights, buffers = dict(live.parts.named_parameters()), dict(live.parts.named_buffers())
    return SyncLook(_checksums(weights), _checksums(buffers), gradients, samples)


def _checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: _checksum(tensor) for name, tensor in tensors.items()}


def _checksum(tensor: Tensor, before: int = 0) -> int:
    """Of all bits, each in its place."""
    if tensor.is_sparse:
        tensor = tensor.detach().coalesce()
        return _checksum(tensor.values(), _checksum(tensor.indices(), before))
    return zlib.crc32(int(checksum(tensor)).to_bytes(8, "little", signed=True), before)


def _samples(data: Any) -> SeenSamples | None:
    with set_aside(), _generators_put_back(data):
        if isinstance(data, DataLoader):
            with suppress(TypeError):  # of an iterable dataset
                return _of_loader(data)
        try:
            iterator = iter(data)
        except TypeError:
            raise WorkloadError(
                f"data ({type(data).__name__}) cannot be iterated: name a DataLoader or a list."
            ) from None
        if iterator is data:
            raise WorkloadError(
                "data can be iterated only once, so no rank can look ahead: name the DataLoader itself."
            )
        found = [_content(batch) for batch in islice(iterator, _BATCHES)]
    known = tuple(one for one in found if one is not None)
    return SeenSamples(known, "micro-batches", numbered=False) if len(known) == len(found) else None


def _of_loader(loader: DataLoader[Any]) -> SeenSamples:
    order: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    keys: Any = (key for entry in order for key in (entry if isinstance(entry, list) else [entry]))
    keys, dataset = list(islice(keys, MOST_SAMPLES)), loader.dataset
    while isinstance(dataset, Subset):
        keys, dataset = [dataset.indices[key] for key in keys], dataset.dataset
    numbers, numbered = _as_numbers(keys)
    return SeenSamples(numbers, "samples", numbered, len(set(numbers)) < len(numbers), _of_dataset(dataset))


def _as_numbers(keys: Any) -> tuple[tuple[int, ...], bool]:
    """Return the same, or checksums of what are no whole numbers."""
    if all(isinstance(key, (int, np.integer)) for key in keys):
        return tuple(map(int, keys)), True
    return tuple(zlib.crc32(repr(key).encode()) for key in keys), False


def _of_dataset(dataset: Any) -> int | None:
    """Return a checksum of its first, middle and last sample."""
    with suppress(Exception):  # it need not be indexed by numbers
        begin_on_host(0, 0)  # what is random in a sample is then the same for all
        return _content([dataset[place] for place in (0, len(dataset) // 2, len(dataset) - 1)])
    return None


def _content(batch: Any) -> int | None:
    """A checksum of anything made of tensors, arrays and plain values; ``None`` where it has something else in it."""
    found = 0
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor):
            found = _checksum(leaf, found)
        elif isinstance(leaf, np.ndarray):
            found = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), found)
        elif isinstance(leaf, _PLAIN):
            found = zlib.crc32(repr(leaf).encode(), found)
        else:
            return None
    return found


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        batch = list(vars(batch).values())
    if isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _leaves(part)
    else:
        yield batch


@contextmanager
def _generators_put_back(data: Any) -> Iterator[None]:
    """Inside, samplers may draw from generators of their own."""
    batches = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {id(one): one for owner in owners if isinstance(one := getattr(owner, "generator", None), torch.Generator)}
    with ExitStack() as stack:
        for generator in found.values():
            stack.callback(generator.set_state, generator.get_state())
        yield
