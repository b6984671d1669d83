"""How long steps and all-reduces take on some of the ranks, as one rank measured it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .messages import Failure
from .step_times import StepTimes

SWEEP_BYTES = tuple(2**power for power in range(10, 27, 2))
"""Sizes of messages, from 1 KiB to 64 MiB."""


@dataclass(frozen=True, slots=True)
class StepsAmong:
    """Steps that the first so many ranks took without the others, and undid.

    Attributes:
        times: of each step; none where one failed, and of ranks that waited meanwhile.
        sent_bytes: of gradients, in one step.
        failure: why this rank could not do one.
    """

    times: tuple[StepTimes, ...] = ()
    sent_bytes: int = 0
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """All-reduces of messages of several sizes.

    Attributes:
        seconds: the median for each size in bytes.
    """

    seconds: Mapping[int, float]
