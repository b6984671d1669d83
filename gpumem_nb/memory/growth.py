"""What one block more of a model would take, read from a recorded step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ..shared.categories import (
    ACTIVATIONS,
    CASTS,
    GRADIENTS,
    INSIDE_OPERATORS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
)
from ..shared.step_times import FORWARD, UPDATE
from .ledger.trace import CODE, Ints, Trace

_WITH_WEIGHTS = [CODE[category] for category in (PARAMETERS, CASTS)]
_WITH_TRAINED = [CODE[category] for category in (OPTIMIZER_STATE, GRADIENTS)]
_SHORT = [CODE[category] for category in (TEMPORARIES, INSIDE_OPERATORS)]


class Blocks(NamedTuple):
    """The repeated blocks of a model: their names, and the part of the weights that one of them has in the mean.

    Of all weights, and of those that are trained, which alone have gradients and state.
    """

    names: Sequence[str]
    weights_share: float
    trained_share: float

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[nn.Module], weights: Iterable[Tensor]) -> Blocks | None:
        """Return those of a model that is trained with these weights; ``None`` if it has no blocks."""
        if not blocks:
            return None
        names = {id(module): name for name, module in model.named_modules()}
        mine = {id(param) for block in blocks for param in block.parameters()}

        def share(params: Sequence[Tensor]) -> float:
            in_blocks = sum(param.nbytes for param in params if id(param) in mine)
            return in_blocks / len(blocks) / max(1, sum(param.nbytes for param in params))

        known = list(weights)
        trained = [weight for weight in known if weight.requires_grad]
        return cls([names.get(id(block), "") for block in blocks], share(known), share(trained))


def of_a_block(trace: Trace, blocks: Blocks) -> int:
    """Return by how many bytes a step's live peak grows at most for each block more, like those that there are.

    A block has its share of the weights, of the gradients and state of those that are trained, and of what the update
    takes for a moment; and of the activations that blocks keep, and others between them, an even part. At most, because
    the part of the step where blocks take most need not be that of the peak.

    Args:
        trace: one recorded step, or one that was continued from two.
        blocks: those that there are.
    """
    place, count = np.abs(trace.event) - 1, len(blocks.names)
    inside = [any(f"{name}.".startswith(f"{block}.") for block in blocks.names) for name in trace.modules]
    in_blocks = np.array(inside, dtype=np.bool_)[trace.module]
    of_blocks, beside = (_made(trace, events) for events in (in_blocks, _between(trace, in_blocks) & ~in_blocks))
    category = trace.category[place]
    short = np.isin(category, _SHORT) & (trace.phase == _number(trace, UPDATE))
    kept = trace.change * (category == CODE[ACTIVATIONS])
    of_activations = np.cumsum(kept * (of_blocks[place] / count + beside[place] / max(1, count - 1)))
    of_weights = blocks.weights_share * _held(trace, _WITH_WEIGHTS, np.isin(category, _WITH_WEIGHTS))
    of_trained = blocks.trained_share * _held(trace, _WITH_TRAINED, np.isin(category, _WITH_TRAINED) | short)
    most: int = math.ceil(max(0, *(of_activations + of_weights + of_trained)))
    return most


def _held(trace: Trace, categories: list[int], events: NDArray[np.bool_]) -> Ints:
    """Return how many bytes live after each event: of these categories before the step, and of these events in it."""
    before = trace.size[trace.before & np.isin(trace.category, categories)].sum()
    held: Ints = before + np.cumsum(np.where(events, trace.change, 0))
    return held


def _made(trace: Trace, events: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which allocations were made by these events."""
    made = np.zeros(len(trace.size), dtype=np.bool_)
    made[trace.event[events & (trace.event > 0)] - 1] = True
    return made


def _between(trace: Trace, in_blocks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which events each forward has from the first block to the last."""
    found = np.zeros(len(trace.event), dtype=np.bool_)
    forward = trace.phase == _number(trace, FORWARD)
    for one in np.split(np.arange(len(found)), np.flatnonzero(np.diff(forward)) + 1):
        if forward[one].any() and len(at := one[in_blocks[one]]):
            found[at[0] : at[-1] + 1] = True
    return found


def _number(trace: Trace, phase: str) -> int:
    return trace.phases.index(phase) if phase in trace.phases else -1
