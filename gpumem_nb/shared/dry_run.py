"""What is asked of a dry run, and what it answers: plain values that travel to a child process and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .forecast import Forecast
from .settings import Settings


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels a GPU has, as far as memory depends on it.

    Attributes:
        flash: attention of 16-bit types by flash kernels (compute capability 8.0 and higher).
        tf32: convolutions of fp32 by tensor cores (the same GPUs; torch allows it by default).
        gemm_workspace_bytes: what cuBLAS gets for each of its two handles.
    """

    flash: bool
    tf32: bool
    gemm_workspace_bytes: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """A question.

    Attributes:
        workload: pickled, because it may be somebody's own code; of a ready-made one its name and options.
        settings: under which to take the steps.
        ranks: how many there would be.
        kernels: of each GPU by its name.
        limits: bytes that may be reserved on each; ``None`` without a limit.
        largest: whether the largest batch size that fits is asked for as well.
    """

    workload: bytes
    settings: Settings
    ranks: int
    kernels: Mapping[str, Kernels]
    limits: Mapping[str, int | None]
    largest: bool = False


@dataclass(frozen=True, slots=True)
class DryAnswer:
    """An answer.

    Attributes:
        forecasts: by the GPU's name.
        largest: the largest batch size that fits, by the GPU's name; 0 if none does.
        parameters: of the model.
        note: what makes the forecast less certain, as a sentence fragment; empty if nothing does.
        problem: why there is no forecast, as a sentence; empty if there is.
        peak_rss_bytes: of the process that answers.
    """

    forecasts: Mapping[str, Forecast]
    largest: Mapping[str, int]
    parameters: int = 0
    note: str = ""
    problem: str = ""
    peak_rss_bytes: int = 0
