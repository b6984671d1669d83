"""What one rank holds of its model and its inputs that it may not need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """Tensors of one kind: how many bytes, how many tensors, and the name of the largest (empty without any)."""

    bytes: int = 0
    tensors: int = 0
    largest: str = ""


@dataclass(frozen=True, slots=True)
class InputFacts:
    """One tensor of a micro-batch.

    Attributes:
        shape, dtype: of the tensor.
        bytes: what it takes.
        enough: the smallest type that holds its values, as float32 does floating ones; ``dtype`` where that is it.
        spare_bytes: what it would take less in that.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    enough: str
    spare_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Of one rank, in bytes.

    Attributes:
        state_of_frozen: what the optimizer remembers of weights that are frozen, and will not be updated.
        wide_weights: weights in float64.
        inputs: of the first micro-batch of a step that was undone; empty where that was not asked, or failed.
    """

    state_of_frozen: Held = Held()
    wide_weights: Held = Held()
    inputs: tuple[InputFacts, ...] = ()
