"""What a rank holds of its model and its inputs that it may not need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..memory.tensors import tensors_in
from ..shared.questions import Held, InputFacts, ModelFacts
from .step.step import Looks

if TYPE_CHECKING:
    from .step.trainer import Trainer

_WHOLE = (torch.uint8, torch.int16, torch.int32)  # from the smallest: what images, labels and tokens come in


def of(trainer: Trainer, inputs: bool) -> ModelFacts:
    """Of what is loaded; with ``inputs`` all ranks take a step for it, which is undone."""
    live, found = trainer.live, list[InputFacts]()

    def look(batch: Any) -> None:
        if not found:
            content = list(batch.values()) if isinstance(batch, Mapping) else batch
            found.extend(map(_facts, tensors_in(content)))

    if inputs:
        trainer.look_into_step(Looks(batch=look))
    names = {id(param): name for name, param in live.parts.named_parameters()}
    state = ((param, sum(one.nbytes for one in tensors_in(kept))) for param, kept in live.optimizer.state.items())
    frozen = [(names.get(id(param), ""), size) for param, size in state if not param.requires_grad]
    wide = [(name, param.nbytes) for name, param in live.parts.named_parameters() if param.dtype == torch.float64]
    return ModelFacts(_held(frozen), _held(wide), tuple(found))


def _held(sizes: Iterable[tuple[str, int]]) -> Held:
    ordered = sorted(((size, name) for name, size in sizes if size), reverse=True)
    return Held(sum(size for size, _ in ordered), len(ordered), ordered[0][1]) if ordered else Held()


def _facts(tensor: Tensor) -> InputFacts:
    enough = _enough(tensor)
    spare = tensor.nbytes - tensor.numel() * enough.itemsize
    return InputFacts(tuple(tensor.shape), _name(tensor.dtype), tensor.nbytes, _name(enough), spare)


def _enough(tensor: Tensor) -> torch.dtype:
    """The smallest type that its values are commonly kept in."""
    if tensor.dtype == torch.float64:
        return torch.float32
    if tensor.dtype not in (torch.int64, torch.int32) or not tensor.numel():
        return tensor.dtype
    low, high = (int(value) for value in tensor.aminmax())
    fits = (kind for kind in _WHOLE if torch.iinfo(kind).min <= low and high <= torch.iinfo(kind).max)
    smaller = next(fits, tensor.dtype)
    return smaller if smaller.itemsize < tensor.dtype.itemsize else tensor.dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
