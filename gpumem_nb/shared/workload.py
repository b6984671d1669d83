"""Workload: the contract between somebody's model and the trainer, and what a rank says of one that it loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset


@dataclass(frozen=True)
class Workload:
    """What is trained: factories that every rank calls for itself.

    Attributes:
        name: what people call it.
        model: returns the model, on the CPU, not wrapped for data parallelism. Rank 0's weights are broadcast.
        data: returns a map-style dataset (``__len__`` and ``__getitem__``); the trainer shards and shuffles it.
        loss: ``loss(model, batch)`` runs the forward pass on one collated micro-batch and returns a scalar tensor,
            averaged over the samples of the micro-batch.
        optimizer: ``optimizer(params)`` returns the workload's own optimizer, chosen with ``optimizer=own``.
        blocks: returns the modules that activation checkpointing wraps, in the order in which forward calls them;
            without it the repeated blocks of the model are found automatically.

    It travels to the ranks by cloudpickle, so classes and functions defined in a notebook work.
    """

    name: str
    model: Callable[[], torch.nn.Module]
    data: Callable[[], Dataset[Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    blocks: Callable[[Any], list[torch.nn.Module]] | None = None


@dataclass(frozen=True, slots=True)
class WorkloadInfo:
    """What was loaded: sizes that the kernel needs to check settings and to describe the workload.

    ``notes`` are sentences that are said once, when it was loaded.
    """

    name: str
    parameters: int
    parameter_bytes: int
    dataset_len: int
    blocks: int
    own_optimizer: str | None = None
    own_learning_rate: float | None = None
    notes: tuple[str, ...] = ()
