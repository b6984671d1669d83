"""Times of steps under other settings, from whole steps that are undone."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from ...memory.tensors import tensors_in
from ...shared.messages import Chunk, Failure
from ...shared.settings import Settings
from ...shared.step_times import UPDATE, StepTimes
from ..link.communicator import here
from .live_model import LiveModel

MOST_STEPS = 5  # after one that warms up
LONGEST_S = 0.3  # no further step is begun after that, but for the second
LONGEST_FIRST_S = 2.0  # nor after a first one that took so long, of which warming up is a small part
MULTIPLIED = 2  # steps at least, of two micro-batches that stand for many: what warming up takes would count as often
_UPDATES_KEPT = 20
LEAST_SHARE = 0.25  # of two micro-batches that the second one takes, whatever noise says

Trying = Callable[[Chunk], AbstractContextManager[Failure | None]]
Step = Callable[[Failure | None, Chunk], tuple[float, float, Failure | None]]


def timed(trying: Trying, step: Step, chunk: Chunk) -> tuple[tuple[float, ...], Failure | None]:
    """The times of a few steps in seconds, as many on all ranks; none where one failed, and why if it failed here.

    Of several micro-batches one and two are timed, because all after the first take alike.

    Args:
        trying: inside of it steps are under the settings of a chunk; gives why these cannot be applied.
        step: takes a step of it, unless something failed before, and undoes it: what it worked and how long it waited
            for data in seconds, or why not.
        chunk: a trial of the settings to time.
    """

    def times(accumulation_steps: int, fewest: int = 1) -> tuple[list[float], Failure | None]:
        settings = chunk.settings.replace(accumulation_steps=accumulation_steps)
        return _times(trying, step, replace(chunk, settings=settings), fewest)

    count = chunk.settings.accumulation_steps
    two, failure = times(min(count, 2), MULTIPLIED if count > 2 else 1)
    if not two or count <= 2:
        return tuple(two), failure
    one, failure = times(1)
    if not one:
        return (), failure
    least = statistics.median(one)
    return tuple(of_two + (count - 2) * max(LEAST_SHARE * of_two, of_two - least) for of_two in two), None


def _times(trying: Trying, step: Step, chunk: Chunk, fewest: int) -> tuple[list[float], Failure | None]:
    """Each step with what the first waited for data: later ones get the same samples, which are there already."""
    found: list[float] = []
    data_s = 0.0
    with trying(chunk) as why_not:
        began_s = time.monotonic()
        while True:
            work_s, waited_s, failure = step(why_not, chunk)
            if here().any_rank(failure is not None, "timing"):
                return [], failure
            data_s = data_s if found else waited_s
            found.append(work_s + data_s)
            took_s = time.monotonic() - began_s
            longest_s = LONGEST_S if len(found) > 1 else LONGEST_FIRST_S
            enough = len(found) > MOST_STEPS or (took_s > longest_s and len(found) >= fewest)
            if here().any_rank(enough, "timing on"):
                return found[1:] or found, None


class UpdateTimes:
    """Times of updates: from those that training performs, because trials perform none."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], deque[float]] = {}
        self._moved_bytes: dict[tuple[object, ...], int] = {}

    def note(self, live: LiveModel, steps: Sequence[StepTimes]) -> None:
        """Take in steps of training, and how many bytes of weights, gradients and state each update goes through."""
        if steps:
            kind = _kind(live.settings)
            self._known.setdefault(kind, deque(maxlen=_UPDATES_KEPT)).extend(one[UPDATE] for one in steps)
            state = sum(tensor.nbytes for tensor in tensors_in(list(live.optimizer.state.values())))
            self._moved_bytes[kind] = 2 * sum(param.nbytes for param in live.parameters) + state

    def of(self, settings: Settings) -> float | None:
        """Return the median of the latest ones of that kind, in seconds; ``None`` where there were none but the first.

        The first one makes the optimizer's state.
        """
        known = self._known.get(_kind(settings), ())
        return statistics.median(known) if len(known) > 1 else None

    def scaled(self, moved_bytes: int) -> float | None:
        """Return the seconds of an update that goes through so many bytes, from the nearest known one."""
        known = [(abs(moved_bytes - bytes_), kind) for kind, bytes_ in self._moved_bytes.items()]
        if not known:
            return None
        _, kind = min(known, key=lambda one: one[0])
        return statistics.median(self._known[kind]) * moved_bytes / self._moved_bytes[kind]


def _kind(settings: Settings) -> tuple[object, ...]:
    """Return what the time of an update depends on."""
    scaled = settings.precision == "fp16"
    return settings.optimizer, settings.optimizer_impl, settings.clip_norm is not None, scaled
