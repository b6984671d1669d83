"""Whether ranks are in step: checksums of what they hold, and which samples they see.

Of what is loaded, and of somebody's own loop by the names of its variables. Of that loop each rank says what it sees
without the others, so that one that is out of step is heard as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..memory.tensors import tensors_in
from ..shared.errors import WorkloadError
from ..shared.sync_look import MOST_SAMPLES, SyncLook
from .data.stream import ShardedStream
from .random_state import set_aside
from .step.checksum import sum_of_words

if TYPE_CHECKING:
    from .step.trainer import Trainer

_BATCHES = 20  # of data without numbered samples


def of_own(model: Any, data: Any) -> SyncLook:
    """Of somebody's own loop, as it stands.

    Args:
        model: whose weights and gradients are meant; may be wrapped for data parallelism.
        data: what this rank goes through in an epoch, or ``None``. Its order is asked for, or a few micro-batches are
            read; random numbers are put back.

    Raises:
        WorkloadError: ``model`` is no module, or ``data`` can be iterated once only.
    """
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"A {type(model).__name__} is no model: name a torch.nn.Module, such as model=net.")
    params = dict(model.named_parameters())
    grads = {name: param.grad for name, param in params.items() if param.grad is not None}
    with set_aside():
        samples, numbered = (None, True) if data is None else _samples(data)
    return SyncLook(_sums(params | dict(model.named_buffers())), _own_buffers(model), _sums(grads), samples, numbered)


def of_loaded(trainer: Trainer) -> SyncLook:
    """Of what is loaded. The gradients are those of a step that is undone, in which all ranks take part."""
    live, stream, gradients = trainer.live, trainer.stream, dict[str, int]()

    def look() -> None:
        params = live.parts.named_parameters()
        gradients.update(_sums({name: param.grad for name, param in params if param.grad is not None}))

    trainer.look_before_update(look)
    weights = dict([*live.parts.named_parameters(), *live.parts.named_buffers()])
    samples, repeats = None, False
    if isinstance(stream, ShardedStream):
        samples, repeats = stream.left_of_epoch(
            live.settings.batch_size, live.settings.accumulation_steps, MOST_SAMPLES
        )
    return SyncLook(_sums(weights), _own_buffers(live.model), gradients, samples, True, repeats)


def _sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: int(sum_of_words(tensor)) for name, tensor in tensors.items()}


def _own_buffers(model: nn.Module) -> frozenset[str]:
    """Statistics that a layer gathers from the samples that it sees."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if getattr(module, "track_running_stats", False)
        for name, _ in module.named_buffers(recurse=False)
    )


def _samples(data: Any) -> tuple[tuple[int, ...], bool]:
    if isinstance(data, DataLoader):
        with suppress(TypeError):  # of an iterable dataset
            order = data.batch_sampler if data.batch_sampler is not None else data.sampler
            numbers = (number for entry in order for number in (entry if isinstance(entry, list) else [entry]))
            return tuple(int(number) for number in islice(numbers, MOST_SAMPLES)), True
    try:
        iterator = iter(data)
    except TypeError:
        raise WorkloadError(f"data ({type(data).__name__}) cannot be iterated: name a DataLoader or a list.") from None
    if iterator is data:
        raise WorkloadError("data can be iterated once only, so nobody can look ahead: name the DataLoader itself.")
    return tuple(map(_checksum, islice(iterator, _BATCHES))), False


def _checksum(batch: Any) -> int:
    found = 0
    for tensor in tensors_in(batch):
        words = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        found = zlib.crc32(words.numpy().tobytes(), found)
    return found
