"""The clinic: broken trainings, whose symptoms the toolkit shows and whose repair is run and measured."""

from __future__ import annotations

from ...exercise import Content
from .cases import NUMBER
from .mathematics import ACCUMULATION, CLIPPING
from .memory import FROZEN, GRAPH, LOGITS, LOSSES, PIECES, VALIDATION
from .together import SAMPLER, SEEDS, SLOW, STATISTICS

CASES = (
    *(GRAPH, LOSSES, VALIDATION, ACCUMULATION, CLIPPING, SAMPLER),
    *(SEEDS, FROZEN, LOGITS, PIECES, SLOW, STATISTICS),
)
LESSON = Content(NUMBER, "The clinic", CASES)
