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
        flash: attention of 16-bit types by flash kernels.
        gemm_workspace_bytes: what cuBLAS keeps for each of its handles.
    """

    flash: bool
    gemm_workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for one GPU.

    Attributes:
        kernels: that it has.
        held_bytes: each piece of memory that Horovod asks of torch's allocator and keeps.
        limit_bytes: of what may be reserved; ``None`` without a limit.
        limit_error_bytes: by how much that may be wrong.
        convolution_bytes: by how much it is less where convolutions are computed.
    """

    kernels: Kernels
    held_bytes: tuple[int, ...]
    limit_bytes: int | None
    limit_error_bytes: int
    convolution_bytes: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """A question.

    Attributes:
        workload: a ``Workload``, pickled, because it may be somebody's own code.
        settings: under which to take the steps.
        gpus: what is asked for each GPU, by name.
        largest: whether the largest batch size that fits is asked for as well.
    """

    workload: bytes
    settings: Settings
    gpus: Mapping[str, Asked]
    largest: bool


@dataclass(frozen=True, slots=True)
class DryAnswer:
    """An answer.

    Attributes:
        forecasts: by the GPU's name; none if there is a problem.
        largest: the largest batch size that fits, by the GPU's name; 0 if none does.
        parameters: numbers in the model.
        convolves: whether it computes convolutions.
        how: the steps were taken, in words.
        problem: why there is no forecast, as a sentence; empty if there is.
        of_input: whether what was asked for cannot be used, and nothing is wrong with the workload.
        peak_rss_bytes: of the process that answers; what it needed to find this.
    """

    forecasts: Mapping[str, Forecast]
    largest: Mapping[str, int]
    parameters: int = 0
    convolves: bool = False
    how: str = ""
    problem: str = ""
    of_input: bool = False
    peak_rss_bytes: int = 0
