"""Looks into a step that is undone: what a rank holds for nothing, and whether its loss is a mean over samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..memory.tensors import tensors_in
from ..shared.messages import Chunk
from ..shared.questions import InputFacts, ModelFacts, TensorTotal
from .link.communicator import here
from .step.parts import evaluating
from .step.step import Looks
from .step.trials import NO_CONFIGURATION

if TYPE_CHECKING:
    from .step.trainer import Trainer

_HALF = 4  # samples; two of them are a micro-batch in which pairs, lengths and classes differ
# Of a gradient's norm: more than fp32, or TF32 on a GPU, loses by adding up in another order; the same for 16 bits.
_ROUNDING, _ROUNDING_16_BIT = 0.01, 0.05
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
    groups = live.optimizer.param_groups
    weights = sum(len(group["params"]) for group in groups)
    model = live.model
    return ModelFacts(_held(frozen), _held(wide), tuple(found), _eager(model), _vocabulary(model), len(groups), weights)


def _eager(model: nn.Module) -> tuple[int, int] | None:
    """Layers and heads of Hugging Face's model, if it computes attention eagerly and could leave that to SDPA."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", "") != "eager" or not getattr(module, "_supports_sdpa", False):
            continue
        if not getattr(config, "output_attentions", False):  # SDPA gives none
            return getattr(config, "num_hidden_layers", 1), getattr(config, "num_attention_heads", 1)
    return None


def _vocabulary(model: nn.Module) -> int:
    """Return how many logits Hugging Face's model makes of a token."""
    for module in model.modules():
        head = None
        with suppress(Exception):  # a model without a head may refuse to answer
            head = module.get_output_embeddings()  # type: ignore[operator]
        if isinstance(weight := getattr(head, "weight", None), Tensor):
            return weight.shape[0]
    return 0


def splits_to_mean(trainer: Trainer) -> bool | None:
    """Find out whether the gradient of a micro-batch is the mean of its halves' gradients; ``None`` if a step fails.

    It is not for losses over pairs of samples, sums, means over tokens, and classes with weights. All ranks take two
    small steps, which are undone: in evaluation mode, because dropout would tell them apart.
    """
    live, seen = trainer.live, list[list[tuple[float, float]]]()
    whole = live.settings.replace(
        batch_size=2 * _HALF, accumulation_steps=1, precision="fp32", checkpointing="none", reduction="average"
    )
    for settings in (whole, whole.replace(batch_size=_HALF, accumulation_steps=2)):
        chunk = Chunk(settings, NO_CONFIGURATION, 1, trial=True)
        trainer.stepper.looks = Looks(gradients=lambda: seen.append(_gradients(live.parameters)))
        try:
            with trainer.aside(settings), trainer.trying(chunk) as why_not, evaluating(live.parts.modules()):
                failed = trainer.try_step(why_not, chunk).failure is not None
        finally:
            trainer.stepper.looks = Looks()
        if here().any_rank(failed, "splits"):
            return None
    narrow = any(param.dtype.itemsize < torch.float32.itemsize for param in live.parameters)
    return _alike(seen[0], seen[1], _ROUNDING_16_BIT if narrow else _ROUNDING) if len(seen) == 2 else None


def _gradients(params: Iterable[Tensor]) -> list[tuple[float, float]]:
    """Return each gradient's norm, and its product with its weight, which tells apart those of the same norm."""
    numbers = []
    for param in params:
        if param.grad is None:
            continue
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        norm = torch.linalg.vector_norm(grad)
        numbers.append(torch.stack([norm, (grad * param.detach()).sum().abs() / (1e-12 + param.detach().norm())]))
    return [(float(norm), float(along)) for norm, along in torch.stack(numbers).tolist()] if numbers else []


def _alike(one: list[tuple[float, float]], other: list[tuple[float, float]], rounding: float) -> bool:
    if len(one) != len(other):
        return False
    largest = max((norm for norm, _ in one), default=0.0)
    if not math.isfinite(largest):
        return False
    return all(
        abs(a - b) <= rounding * max(norm, 1e-3 * largest)
        for (norm, along), (norm_b, along_b) in zip(one, other, strict=True)
        for a, b in ((norm, norm_b), (along, along_b))
    )


def _held(sizes: Iterable[tuple[str, int]]) -> TensorTotal:
    ordered = sorted(((size, name) for name, size in sizes if size), reverse=True)
    return TensorTotal(sum(size for size, _ in ordered), len(ordered), ordered[0][1]) if ordered else TensorTotal()


def _facts(tensor: Tensor) -> InputFacts:
    enough = _enough(tensor)
    spare = tensor.nbytes - tensor.numel() * enough.itemsize
    return InputFacts(tuple(tensor.shape), _name(tensor.dtype), tensor.nbytes, _name(enough), spare)


def _enough(tensor: Tensor) -> torch.dtype:
    """Return the smallest type that its values are commonly kept in."""
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
