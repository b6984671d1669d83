"""The knob ``precision``. Each step reads it by itself."""

from __future__ import annotations

from collections.abc import Iterator

from ..categories import ACTIVATIONS, CASTS, INSIDE_OPERATORS, TEMPORARIES
from .knob import HALF, MOST, Changes, Knob, Need, carried


def _lighter(need: Need) -> Iterator[Changes]:
    sixteen_bit = need.settings.precision != "fp32"
    if need.category == CASTS and sixteen_bit:
        yield {"precision": "fp32"}
    elif need.category != CASTS and not sixteen_bit and not need.of_update:
        yield {"precision": "bf16"}


PRECISION = Knob(
    "precision",
    "fp32",
    "arithmetic of forward and backward: fp32, or autocast to fp16 (with loss scaling) or bf16",
    in_front=True,
    choices=("fp32", "fp16", "bf16"),
    short="",
    moves={ACTIVATIONS: HALF, CASTS: MOST, TEMPORARIES: HALF, INSIDE_OPERATORS: HALF},
    lighter=_lighter,
    exported=carried,
)
