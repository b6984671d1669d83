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
        tf32: convolutions of fp32 by tensor cores, as torch allows by default.
    """

    flash: bool
    tf32: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for one GPU.

    Attributes:
        kernels: that it has.
        held_bytes: each piece of memory that libraries ask of torch's allocator and keep, by category.
        limit_bytes: of what may be reserved; ``None`` without a limit.
        sure_bytes: the same less what a forecast may be wrong by.
    """

    kernels: Kernels
    held_bytes: Mapping[str, tuple[int, ...]]
    limit_bytes: int | None
    sure_bytes: int | None


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
        how: the steps were taken, in words.
        problem: why there is no forecast, as a sentence; empty if there is.
        of_input: whether what was asked for cannot be used, and nothing is wrong with the workload.
        peak_rss_bytes: of the process that answers; what it needed to find this.
    """

    forecasts: Mapping[str, Forecast]
    largest: Mapping[str, int]
    parameters: int = 0
    how: str = ""
    problem: str = ""
    of_input: bool = False
    peak_rss_bytes: int = 0
