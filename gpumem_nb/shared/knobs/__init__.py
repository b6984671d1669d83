"""One file for each few knobs that belong together, and the table that lists them in the order shown and applied.

A new knob is a :class:`Knob` in one of these files and a line in the table at the end. Everything else reads the table:
parser, completion, panel, advice, what is tried out after memory ran out, and each rank when it applies settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from keyword import iskeyword

from ..errors import InvalidInput
from ..values import TAKEN
from .communication import COMMUNICATION_KNOBS
from .knob import CHANGES, KEEPS, KEEPS_TO_ROUNDING, Knob, LiveModel, Need
from .loading import NUM_WORKERS, ON_BAD_SAMPLE, PIN_MEMORY, PREFETCH_FACTOR
from .shards import OFFLOAD_OPTIMIZER, SHARD_GRADIENTS, SHARD_OPTIMIZER
from .step import (
    ACCUMULATION_STEPS,
    ACTIVATION_BUDGET,
    BATCH_SIZE,
    CHECKPOINTING,
    COMPILE,
    LOSS_HEAD,
    OFFLOAD_ACTIVATIONS,
    PRECISION,
)
from .update import (
    CLIP_NORM,
    LEARNING_RATE,
    LR_SCALING,
    LR_SCHEDULE,
    OPTIMIZER,
    OPTIMIZER_IMPL,
    REFERENCE_BATCH,
    SCHEDULE_STEPS,
    WARMUP_STEPS,
)

__all__ = [
    "CHANGES",
    "KEEPS",
    "KEEPS_TO_ROUNDING",
    "KNOBS",
    "Knob",
    "LiveModel",
    "Need",
    "additional",
    "register",
    "register_new",
]

KNOBS: dict[str, Knob] = {}


def register(knob: Knob) -> None:
    """Add a knob to this process's table.

    Ranks have tables of their own: those started later get the notebook's additional knobs, running ones only what is
    registered there too. Names of the session's rules (such as ``on_oom``) are not known here: choose others.

    Raises:
        InvalidInput: the name is taken or cannot be one, or the knob does not accept its own default.
    """
    name, default = knob.name, knob.default
    if not name.isidentifier() or iskeyword(name) or name.startswith("_"):
        raise InvalidInput(f"{name!r} cannot name a knob: it must be a Python identifier, such as batch_size.")
    if name in KNOBS:
        raise InvalidInput(f"There is a knob {name!r} already. Choose another name.")
    if name in TAKEN:
        raise InvalidInput(f"{name!r} cannot name a knob: settings use it for something else. Choose another name.")
    if not knob.choices and knob.parse is None:
        raise InvalidInput(f"The knob {name!r} accepts no value: give it choices or parse.")
    try:
        hash(default)
    except TypeError:
        raise InvalidInput(
            f"The default {default!r} of the knob {name!r} cannot be hashed, as settings are. Use a tuple or text."
        ) from None
    if (stored := knob.check(default)) != default:
        raise InvalidInput(f"The knob {name!r} stores its default {default!r} as {stored!r}: give it that.")
    KNOBS[name] = knob


def register_new(knobs: Iterable[Knob]) -> None:
    """Add those that are not known here yet; a module that both processes import may have added some."""
    for knob in knobs:
        if knob.name not in KNOBS:
            register(knob)


def additional() -> tuple[Knob, ...]:
    """Return the knobs that were registered besides the built-in ones."""
    return tuple(knob for name, knob in KNOBS.items() if name not in _BUILT_IN)


for _knob in (
    PRECISION,
    CHECKPOINTING,
    ACTIVATION_BUDGET,
    LOSS_HEAD,
    OFFLOAD_ACTIVATIONS,
    COMPILE,
    BATCH_SIZE,
    ACCUMULATION_STEPS,
    OPTIMIZER,
    OPTIMIZER_IMPL,
    SHARD_OPTIMIZER,
    SHARD_GRADIENTS,
    OFFLOAD_OPTIMIZER,
    LR_SCALING,
    REFERENCE_BATCH,
    WARMUP_STEPS,
    LR_SCHEDULE,
    SCHEDULE_STEPS,
    LEARNING_RATE,
    CLIP_NORM,
    NUM_WORKERS,
    PREFETCH_FACTOR,
    PIN_MEMORY,
    ON_BAD_SAMPLE,
    *COMMUNICATION_KNOBS,
):
    register(_knob)
_BUILT_IN = frozenset(KNOBS)
