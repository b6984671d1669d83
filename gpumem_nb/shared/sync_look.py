"""What one rank saw of weights, gradients and data when all ranks were asked whether they are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_SAMPLES = 100_000  # of each rank that are compared


@dataclass(frozen=True, slots=True)
class SyncLook:
    """Checksums of one rank's tensors by name, and which samples it sees.

    Attributes:
        weights: of parameters and buffers.
        own: names of buffers that steps change on each rank for itself, such as batch norm's statistics.
        gradients: of parameters that have one; empty where none has.
        samples: numbers of the samples in the dataset, or checksums of micro-batches; ``None`` if nobody asked.
        numbered: whether they are numbers in the dataset.
        repeats: whether the sampler draws some samples more than once an epoch.
    """

    weights: Mapping[str, int]
    own: frozenset[str] = frozenset()
    gradients: Mapping[str, int] = field(default_factory=dict)
    samples: tuple[int, ...] | None = None
    numbered: bool = True
    repeats: bool = False
