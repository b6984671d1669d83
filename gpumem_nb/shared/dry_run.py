"""Questions to a dry run and its answers: plain values that are sent to a child process and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .forecast import Forecast
from .settings import Settings

SEARCH_S = 120
"""For which the largest batches are looked for, once it is known what was asked for."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a GPU, as far as memory depends on them.

    Attributes:
        ampere: those of compute capability 8.0 and later, such as flash attention and fused attention of bf16.
        gemm_workspace_bytes: what cuBLAS keeps for each of its handles.
    """

    ampere: bool
    gemm_workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Target:
    """The part of a question that is about one GPU.

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
        workload: a ``Workload``, pickled, because it may be the user's own code.
        settings: under which to take the steps.
        gpus: what is asked for each GPU, by name.
        largest: whether the largest batch size that fits is asked for as well.
        adapts: whether a batch size that the data brings comes before that of the settings, which was not named.
        sources: of code that lies in no file, such as cells, by what stands in place of the file's name.
    """

    workload: bytes
    settings: Settings
    gpus: Mapping[str, Target]
    largest: bool
    adapts: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OnGpu:
    """The result for one GPU.

    Attributes:
        forecast: of a step.
        limit_bytes: of what may be reserved, with regard to convolutions; ``None`` without a limit.
        convolves: whether convolutions are computed.
        how: the steps were taken, in words.
        largest: the largest batch size that fits, 0 if none does; ``None`` if not asked for, the data says it, or it is
            not known.
        unknown: why the largest batch size is not known, as a sentence; empty if it is, or was not asked for.
    """

    forecast: Forecast
    limit_bytes: int | None
    convolves: bool
    how: str
    largest: int | None = None
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class DryAnswer:
    """An answer, whole in itself; a later one to the same question knows more largest batches.

    Attributes:
        of: what was found, by the GPU's name; nothing if there is a problem.
        settings: under which the steps were taken, with the data's own batch size.
        parameters: numbers in the model.
        problem: why there is no forecast, as a sentence; empty if there is.
        of_input: whether what was asked for cannot be used, and nothing is wrong with the workload.
        peak_rss_bytes: of the process that answers; what it needed to find this.
    """

    of: Mapping[str, OnGpu]
    settings: Settings
    parameters: int = 0
    problem: str = ""
    of_input: bool = False
    peak_rss_bytes: int = 0
