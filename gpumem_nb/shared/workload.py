"""Workload: the contract between your model and the trainer, and a rank's description of one that it loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Taken:
    """Something that was taken of a trainer: a knob or another part, its value in words, and what says so."""

    what: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """The answer to ``attach(trainer=...)``: what is trained as the trainer would train it, and what is not.

    Attributes:
        kind: of the trainer, in words, such as ``transformers' Trainer``.
        knobs: first values by the names of knobs; those of the optimizer and the data are taken from these themselves.
        taken: in the order in which it is shown.
        left_out: a sentence for each thing that is not kept.
        arguments: what sets a knob in the trainer's own program, by the knob's name.
    """

    kind: str
    knobs: tuple[tuple[str, Any], ...] = ()
    taken: tuple[Taken, ...] = ()
    left_out: tuple[str, ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Workload:
    """A model, its data, loss and optimizer, as factories that every rank calls for itself.

    Attributes:
        name: what people call it.
        model: returns the model, on the CPU, not wrapped for data parallelism. Rank 0's weights are broadcast.
        data: returns a map-style dataset, a ``DataLoader``, tensors or arrays of equal length (a tuple or a dict of
            them), or an iterable of micro-batches; the trainer shards it over the ranks.
        loss: ``loss(model, batch)`` runs the forward pass on one collated micro-batch and returns a scalar tensor,
            averaged over the samples of the micro-batch.
        optimizer: ``optimizer(params)`` returns the workload's own optimizer, chosen with ``optimizer=own``.
        blocks: returns the modules that activation checkpointing wraps, in the order in which forward calls them;
            without it the repeated blocks of the model are found automatically.
        scheduler: ``scheduler(optimizer)`` returns the learning-rate scheduler of the workload's own optimizer (one of
            ``torch.optim.lr_scheduler``), which with ``lr_schedule=own`` goes on with every step done with that.
        eval_data: returns what the model is validated on, a map-style dataset or a ``DataLoader`` of one, of which the
            dataset, its subset and the collate function are used; each sample is seen exactly once, in order.
        metric: ``metric(model, batch)`` runs the forward pass on one collated micro-batch of ``eval_data`` and returns
            a number, or a dict of numbers by name. They are averaged over micro-batches and ranks, weighted by samples,
            so they must be means over samples: an accuracy is one, an F1 score or an area under a curve is not.
        adopted: what it was taken of, where a trainer was attached.
        head: returns the ``torch.nn.Linear`` that makes the logits, whose cross-entropy ``loss_head=chunked`` computes
            in parts; without it the model's output embeddings are taken, or its last linear layer.

    It travels to the ranks by cloudpickle, so classes and functions defined in a notebook work.
    """

    name: str
    model: Callable[[], torch.nn.Module]
    data: Callable[[], Any]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    blocks: Callable[[Any], list[torch.nn.Module]] | None = None
    scheduler: Callable[[Any], torch.optim.lr_scheduler.LRScheduler] | None = None
    eval_data: Callable[[], Any] | None = None
    metric: Callable[[Any, Any], Any] | None = None
    adopted: Adopted | None = None
    head: Callable[[Any], torch.nn.Module] | None = None


@dataclass(frozen=True, slots=True)
class DataInfo:
    """The form in which the data was handed over.

    ``batch_size``, ``num_workers``, ``pin_memory`` and ``prefetch_factor`` are those of a ``DataLoader`` (``None``: it
    does not say), and become the first values of the knobs. ``batched``: the data brings micro-batches of its own, of
    ``batch_size`` samples. ``iterable``: it can be iterated only. ``pinnable``: the device gains from pinned memory.
    """

    batch_size: int | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    prefetch_factor: int | None = None
    batched: bool = False
    iterable: bool = False
    pinnable: bool = False


@dataclass(frozen=True, slots=True)
class Splits:
    """Facts that decide whether a micro-batch can be trained in parts.

    ``batch_norm``: whether the model takes statistics from micro-batches. ``mean``: whether a micro-batch's gradient is
    the mean of its parts' gradients, as it is where the loss is a mean over samples; ``None`` before ranks looked.
    """

    batch_norm: bool = False
    mean: bool | None = None


@dataclass(frozen=True, slots=True)
class Handles:
    """What knobs that free memory can take hold of in a model.

    ``blocks``: how many blocks can be checkpointed. ``logits``: whether its last linear layer has more classes than
    features, so that logits are large. ``matrices``: whether it trains hidden matrices, for which Muon is made.
    ``shards``: whether ranks can share the optimizer's state. ``compiles``: whether its blocks can be compiled, and
    there is time to try that. ``offloads``: whether copies to host memory are timed before anyone is advised to take
    them.
    """

    blocks: int = 0
    logits: bool = False
    matrices: bool = False
    shards: bool = False
    compiles: bool = False
    offloads: bool = False


@dataclass(frozen=True, slots=True)
class WorkloadInfo:
    """A description of the loaded workload: sizes that the kernel needs to check settings and to describe the workload.

    ``dataset_len`` is the number of samples in an epoch; ``None`` when it is not known. ``own_optimizer`` and
    ``own_scheduler`` are the classes of those that it brings. ``notes`` are sentences that are said once, when it was
    loaded; ``eval_len`` is ``None`` where nothing was given to validate on. ``why_flat`` is why Horovod cannot reduce
    in stages here, inside of hosts and between them; empty where it can. ``options``: of a ready-made workload.
    ``batch_norm``: whether the model takes statistics from micro-batches.
    ``trained_before``: steps that its weights were trained for before it was attached. ``adopted``: what was taken of a
    trainer that was attached. ``blocks``, ``logits`` and ``matrices``: see :class:`Handles`. ``why_whole`` is why ranks
    cannot share any optimizer's state; empty where they can, ``None`` where that is not known. ``why_uncompiled`` says
    the same of compiling its blocks.
    """

    name: str
    parameters: int
    parameter_bytes: int
    dataset_len: int | None
    blocks: int
    own_optimizer: str | None = None
    own_learning_rate: float | None = None
    notes: tuple[str, ...] = ()
    data: DataInfo = DataInfo()
    eval_len: int | None = None
    own_scheduler: str | None = None
    why_flat: str = ""
    options: tuple[tuple[str, float], ...] = ()
    batch_norm: bool = False
    trained_before: int = 0
    adopted: Adopted | None = None
    logits: bool = False
    matrices: bool = False
    why_whole: str | None = None
    why_uncompiled: str | None = None

    @property
    def handles(self) -> Handles:
        """Return what knobs that free memory can take hold of."""
        return Handles(self.blocks, self.logits, self.matrices, self.why_whole == "")

    def samples_per_micro_batch(self, ranks: int, accumulation_steps: int) -> int | None:
        """As many as an epoch has for each micro-batch of one step; ``None`` when that is not known."""
        return None if self.dataset_len is None else self.dataset_len // ranks // accumulation_steps
