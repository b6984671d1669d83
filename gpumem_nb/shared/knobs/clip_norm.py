"""The knob ``clip_norm``. Each step reads it by itself."""

from __future__ import annotations

from .knob import Knob, carried
from .option import positive

CLIP_NORM = Knob(
    "clip_norm",
    None,
    "largest allowed 2-norm of all gradients together, or none",
    parse=positive,
    allowed="a number above 0, such as 1.0, or none",
    words={"none": None},
    short="clip ",
    exported=carried,
)
