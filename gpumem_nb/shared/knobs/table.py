"""The table of all knobs, in the order in which they are shown and applied."""

from __future__ import annotations

from ..errors import InvalidInput
from .batch import ACCUMULATION_STEPS, BATCH_SIZE
from .checkpointing import CHECKPOINTING
from .clip_norm import CLIP_NORM
from .knob import Knob
from .optimizer import LEARNING_RATE, OPTIMIZER, OPTIMIZER_IMPL
from .precision import PRECISION

KNOBS: dict[str, Knob] = {}


def register(knob: Knob) -> None:
    """Add a knob to this process's table. Ranks have tables of their own: register it there too.

    Raises:
        InvalidInput: the name is taken or not an identifier, or the default is not a value that the knob accepts.
    """
    if not knob.name.isidentifier() or knob.name.startswith("_"):
        raise InvalidInput(f"{knob.name!r} cannot name a knob: it must be a Python identifier, such as batch_size.")
    if knob.name in KNOBS:
        raise InvalidInput(f"There is a knob {knob.name!r} already. Choose another name.")
    knob.check(knob.default)
    KNOBS[knob.name] = knob


for _knob in (
    PRECISION,
    CHECKPOINTING,
    BATCH_SIZE,
    ACCUMULATION_STEPS,
    OPTIMIZER,
    OPTIMIZER_IMPL,
    LEARNING_RATE,
    CLIP_NORM,
):
    register(_knob)
