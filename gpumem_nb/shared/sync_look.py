"""What one rank saw of weights, gradients and data when all ranks were asked whether they are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_SAMPLES = 100_000  # of each rank that are compared


@dataclass(frozen=True, slots=True)
class SeenSamples:
    """Which samples a rank sees, each as a number.

    Attributes:
        numbers: of the samples in the dataset, or checksums.
        what: they are: samples, or micro-batches.
        numbered: whether they are numbers in the dataset, and no checksums.
        repeats: whether the rank sees some more than once.
        dataset: a checksum of some samples of the dataset, by which datasets are told apart; ``None`` if not known.
    """

    numbers: tuple[int, ...]
    what: str = "samples"
    numbered: bool = True
    repeats: bool = False
    dataset: int | None = None


@dataclass(frozen=True, slots=True)
class SyncLook:
    """Checksums of one rank's tensors by name, and which samples it sees.

    Attributes:
        weights: of parameters.
        buffers: of what is no parameter, such as statistics.
        gradients: of parameters that have one; empty where none has.
        samples: ``None`` if nobody asked, or they cannot be told apart.
    """

    weights: Mapping[str, int]
    buffers: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)
    samples: SeenSamples | None = None
