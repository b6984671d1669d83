"""How long steps under other settings would take, from whole steps that are undone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from ...shared.forecast import Timing
from ...shared.messages import Chunk, Failure
from ..together.agreement import any_rank

MOST_STEPS = 5  # after one that warms up
LONGEST_S = 0.3  # no further step is begun after that

Trying = Callable[[Chunk], AbstractContextManager[Failure | None]]
Step = Callable[[Failure | None, Chunk], tuple[float, Failure | None]]


def timed(trying: Trying, step: Step, chunk: Chunk) -> Timing:
    """The times of a few steps, as many on all ranks.

    Of several micro-batches one and two are timed, because all after the first take alike.

    Args:
        trying: inside of it steps are under the settings of a chunk; gives why these cannot be applied.
        step: takes a step of it, unless something failed before, and undoes it: what it worked in seconds, or why not.
        chunk: a trial of the settings to time.
    """

    def times(accumulation_steps: int) -> tuple[list[float], Failure | None]:
        settings = chunk.settings.replace(accumulation_steps=accumulation_steps)
        return _times(trying, step, replace(chunk, settings=settings))

    count = chunk.settings.accumulation_steps
    two, failure = times(min(count, 2))
    if not two or count <= 2:
        return Timing(tuple(two), failure)
    one, failure = times(1)
    pairs = zip(sorted(two), sorted(one), strict=False)
    return Timing(tuple(of_two + (count - 2) * max(0.0, of_two - of_one) for of_two, of_one in pairs), failure)


def _times(trying: Trying, step: Step, chunk: Chunk) -> tuple[list[float], Failure | None]:
    found: list[float] = []
    with trying(chunk) as why_not:
        began_s = time.monotonic()
        while True:
            work_s, failure = step(why_not, chunk)
            if any_rank(failure is not None, "timing"):
                return [], failure
            found.append(work_s)
            if any_rank(len(found) > MOST_STEPS or time.monotonic() - began_s > LONGEST_S, "timing on"):
                return found[1:] or found, None  # of a step that takes that long, warming up is a small part
