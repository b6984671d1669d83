"""The loss and the metrics of a transformers ``Trainer``, as it would compute them on as many processes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...internals.transformers_internals import among
from ...shared.errors import WorkloadError
from ..step.evaluation import WholeMetric
from ..step.own_loss import StepLoss
from .prepared import unwrapped

_PADDING = -100  # transformers' own, of labels and of predictions that differ in length
_HOST = torch.device("cpu")


class TrainerLoss(StepLoss):
    """``compute_loss`` of a ``Trainer``, with what it hands over as ``num_items_in_batch``.

    Several processes of its own would each be given the items (tokens, say) of all of them, and multiply by their
    number what they then average. So it is here: a step's gradient is that of the sum over all ranks, divided by all of
    their items, whatever each of them holds.

    Attributes:
        criterion: the function in it that computes the loss.
    """

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self._trainer, self._device = trainer, device
        self._by_function = trainer.compute_loss_func is not None
        self.criterion = trainer.compute_loss_func if self._by_function else type(trainer).compute_loss
        self.together = counts_all_ranks(trainer)
        self._items: Any = None
        self._ranks = self._count = 1
        self._alone = True

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the loss of one micro-batch, as a share of a step that divides by its micro-batches and ranks."""
        unwrapped(model)  # a cell that calls the trainer's evaluate() lets accelerate put a precision around it again
        batch = copy.copy(batch)  # some take their labels out of it
        items = self._counted([batch])[1] if self._alone else self._items
        with among(self._trainer, self._ranks, self._count):
            loss = self._trainer.compute_loss(model, batch, num_items_in_batch=self._on_device(items))
        return loss * self._count if self._is_scaled(items) else loss

    def begin(self, model: Any, batches: Iterable[Any], count: int) -> Iterable[Any]:
        """Fetch the micro-batches of a step, and count what is in them, as the ``Trainer`` does."""
        fetched, self._items = self._counted(batches, count)
        self._count, self._ranks, self._alone = count, 1, False
        return fetched

    def alone(self) -> None:
        """Each micro-batch divides by its own items, as in the ``Trainer``'s evaluation."""
        self._count = self._ranks = 1
        self._alone = True

    @property
    def items(self) -> int | None:
        """Return what the step that began holds on this rank; ``None`` where nothing is counted."""
        return None if self._items is None else int(self._items)

    def hold(self, items: int, ranks: int) -> None:
        """Divide by ``items``, which the steps of so many ranks hold together."""
        whole = self._items if isinstance(self._items, Tensor) else torch.zeros((), dtype=torch.float32, device=_HOST)
        self._items, self._ranks = torch.full_like(whole, items), ranks

    def _counted(self, batches: Iterable[Any], count: int = 1) -> tuple[list[Any], Any]:
        fetched, items = self._trainer.get_batch_samples(iter(batches), count, _HOST)
        return fetched, items

    def _on_device(self, items: Any) -> Any:
        return items.to(self._device, non_blocking=True) if isinstance(items, Tensor) else items

    def _is_scaled(self, items: Any) -> bool:
        """Return whether it was divided by what the whole step holds, and not only by what its micro-batch does."""
        said = getattr(self._trainer, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        return self._by_function or (self._trainer.model_accepts_loss_kwargs and items is not None)


def counts_all_ranks(trainer: Any) -> bool:
    """Return whether the ``Trainer`` divides a loss by the items of all processes."""
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    return bool(counts and trainer.args.average_tokens_across_devices)


class TrainerMetric(WholeMetric):
    """``compute_metrics`` of a ``Trainer``, given all predictions and labels in the order of the validation data.

    Attributes:
        criterion: the user's own function.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.criterion = trainer.compute_metrics

    def part(self, model: Any, batch: Any) -> Any:
        """Return losses, predictions, labels and inputs of one micro-batch, as far as they are asked for."""
        trainer, include = self._trainer, self._trainer.args.include_for_metrics
        batch = copy.copy(batch)
        with among(trainer, 1, 1):
            loss, logits, labels = trainer.prediction_step(model, batch, False, ignore_keys=None)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        inputs = batch[getattr(model, "main_input_name", "input_ids")] if "inputs" in include else None
        arrays = _arrays([logits, labels, inputs])
        count = next(map(len, _leaves(arrays)), 0)
        losses = np.repeat(_arrays(loss), count) if "loss" in include and loss is not None else None
        return count, [*arrays, losses]

    def whole(self, ranks: list[list[Any]]) -> Mapping[str, Any]:
        """Return what ``compute_metrics`` says of all of them.

        Raises:
            WorkloadError: it gives no dict of numbers.
        """
        from transformers import EvalPrediction

        parts, places = list[Any](), list[int]()
        for rank, ours in enumerate(ranks):
            seen = 0
            for count, part in ours:
                places += range(rank + seen * len(ranks), rank + (seen + count) * len(ranks), len(ranks))
                seen += count
                parts.append(part)
        logits, labels, inputs, losses = _in_order(_joined(parts), np.argsort(places))
        if logits is None or labels is None:
            return {}
        found = self.criterion(EvalPrediction(predictions=logits, label_ids=labels, inputs=inputs, losses=losses))
        if not isinstance(found, Mapping):
            raise WorkloadError(f"compute_metrics gave a {type(found).__name__}. It must give a dict of numbers.")
        return {name: _plain(value) for name, value in found.items()}


def _arrays(value: Any) -> Any:
    """Return the same with arrays on the host in place of tensors; NumPy knows no bf16."""
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _arrays(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_arrays(item) for item in value) if type(value) in (list, tuple) else [*map(_arrays, value)]
    return value


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, np.ndarray) and value.ndim:
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)


def _joined(parts: Sequence[Any]) -> Any:
    """Return the rows of all parts below one another, as wide as the widest."""
    first = parts[0] if parts else [None] * 4
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined([part[place] for part in parts]) for place in range(len(first)))
    if not isinstance(first, np.ndarray):
        return first
    width = max((part.shape[1] for part in parts), default=0) if first.ndim > 1 else 0
    return np.concatenate([_widened(part, width) for part in parts])


def _widened(rows: Any, width: int) -> Any:
    if rows.ndim < 2 or rows.shape[1] == width:
        return rows
    beside = [(0, 0), (0, width - rows.shape[1]), *((0, 0) for _ in rows.shape[2:])]
    return np.pad(rows, beside, constant_values=_PADDING)


def _in_order(value: Any, order: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_order(item, order) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_in_order(item, order) for item in value)
    return value[order] if isinstance(value, np.ndarray) and value.ndim and len(value) == len(order) else value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
