"""What one block more of a model would take, read from a recorded step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..shared.categories import (
    ACTIVATIONS,
    CASTS,
    GRADIENTS,
    INSIDE_OPERATORS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
)
from ..shared.step_times import UPDATE
from .ledger.trace import CODE, Trace

_WITH_WEIGHTS = [CODE[category] for category in (PARAMETERS, OPTIMIZER_STATE, GRADIENTS, CASTS)]
_SHORT = [CODE[category] for category in (TEMPORARIES, INSIDE_OPERATORS)]


class Blocks(NamedTuple):
    """The repeated blocks of a model: their names, and the part of all weights that one of them has in the mean."""

    names: Sequence[str]
    weights_share: float


def of_a_block(trace: Trace, blocks: Blocks) -> int:
    """Return by how many bytes a step's live peak grows at most for each block more, like those that there are.

    A block has its share of the weights, of their gradients and state, and of what the update takes for a moment; and
    of the activations that blocks keep, an even part. At most, because the part of the step where blocks take most need
    not be that of the peak.

    Args:
        trace: one recorded step, or one that was continued from two.
        blocks: those that there are.
    """
    place = np.abs(trace.event) - 1
    inside = [any(f"{name}.".startswith(f"{block}.") for block in blocks.names) for name in trace.modules]
    of_blocks = np.zeros(len(trace.size), dtype=np.bool_)
    of_blocks[place[(trace.event > 0) & np.array(inside, dtype=np.bool_)[trace.module]]] = True
    category, update = trace.category[place], trace.phase == _number(trace, UPDATE)
    kept = of_blocks[place] & (category == CODE[ACTIVATIONS])
    with_weights = np.isin(category, _WITH_WEIGHTS) | (np.isin(category, _SHORT) & update)
    before = trace.size[trace.before & np.isin(trace.category, _WITH_WEIGHTS)].sum()
    of_activations = np.cumsum(np.where(kept, trace.change, 0)) / len(blocks.names)
    of_weights = before + np.cumsum(np.where(with_weights, trace.change, 0))
    share = blocks.weights_share
    most: int = math.ceil(max([before * share, *(of_activations + share * of_weights)]))
    return most


def _number(trace: Trace, phase: str) -> int:
    return trace.phases.index(phase) if phase in trace.phases else -1
