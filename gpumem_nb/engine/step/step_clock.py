"""How long each part of a step takes: by the process's clock, and on GPUs by the device's."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...shared.step_times import DATA, TOOLKIT, Lap, StepLanes, StepTimes
from ...shared.units import format_bytes

UNDOING = "undoing"  # a part of the toolkit's share that no step has but those that may have to be undone


@dataclass(frozen=True, slots=True)
class Flight:
    """One bucket of gradients on its way; times as :func:`time.perf_counter` has them.

    ``arrived_s`` is when that was noticed: with the next gradient, or after backward.
    """

    bytes: int
    sent_s: float
    arrived_s: float


@dataclass(frozen=True, slots=True)
class Laps:
    """The parts of one step in the order in which they came, each ended by the next.

    Attributes:
        parts: those that begin at each of ``began_s`` but the last, which is the end.
        began_s: as :func:`time.perf_counter` has it.
        marks: on GPUs the device's events at the same places.
        flights: of its gradients.
        backward_ended_s: when the last gradient was there.
    """

    parts: Sequence[str]
    began_s: Sequence[float]
    marks: Sequence[torch.cuda.Event]
    flights: Sequence[Flight]
    backward_ended_s: float

    def times(self) -> StepTimes:
        """What each part took; on GPUs it waits until the device is done with the step."""
        reached_s, hidden_s = self.began_s, None
        if self.marks:
            self.marks[-1].synchronize()
            reached_s = [self.marks[0].elapsed_time(mark) / 1000 for mark in self.marks]
        else:
            hidden_s = self._hidden_s()
        taken_s = _summed(self.parts, reached_s)
        taken_s[TOOLKIT] += taken_s.pop(UNDOING, 0.0)
        return StepTimes.of(taken_s, hidden_s)

    @property
    def step_s(self) -> float:
        """How long the step took the process."""
        return self.began_s[-1] - self.began_s[0]

    def lanes(self, rank: int, step: int) -> StepLanes:
        """The same as it happened; on GPUs parts are the device's, which begin when the process began."""
        began_s = self.began_s
        if self.marks:
            self.marks[-1].synchronize()
            began_s = [self.began_s[0] + self.marks[0].elapsed_time(mark) / 1000 for mark in self.marks]
        wall_s = time.time() - time.perf_counter()
        ends = zip(self.parts, began_s, began_s[1:], strict=False)
        parts = (
            Lap(TOOLKIT if part == UNDOING else part, wall_s + began, wall_s + ended) for part, began, ended in ends
        )
        flights = (
            Lap(format_bytes(one.bytes), wall_s + one.sent_s, wall_s + one.arrived_s)
            for one in ([] if self.marks else self.flights)
        )
        return StepLanes(rank, step, tuple(parts), tuple(flights))

    def _hidden_s(self) -> float:
        """Time in which gradients were on their way while backward went on: they may overlap."""
        hidden_s, until_s = 0.0, 0.0
        for flight in sorted(self.flights, key=lambda flight: flight.sent_s):
            end_s = min(flight.arrived_s, self.backward_ended_s)
            hidden_s += max(0.0, end_s - max(flight.sent_s, until_s))
            until_s = max(until_s, end_s)
        return hidden_s


class StepClock:
    """Follows one step after the other; parts leave no gaps.

    Args:
        device: whose time counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._parts: list[str] = []
        self._began_s: list[float] = []
        self._marks: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """A step begins, with what the toolkit does first."""
        self._parts, self._began_s, self._marks = [], [], []
        self.enter(TOOLKIT)

    def enter(self, part: str) -> None:
        """A part begins, and the one before ends."""
        self._parts.append(part)
        self._note()

    def work_s(self) -> float:
        """By the process's clock what the step took until now, without waiting for data and copies to undo it."""
        taken_s = _summed(self._parts, [*self._began_s, time.perf_counter()])
        return sum(taken_s.values()) - taken_s[DATA] - taken_s[UNDOING]

    def data_s(self) -> float:
        """How long the step has waited for data until now."""
        return _summed(self._parts, [*self._began_s, time.perf_counter()])[DATA]

    def end(self, flights: Sequence[Flight], backward_ended_s: float) -> Laps:
        """The step is over."""
        self._note()
        return Laps(tuple(self._parts), tuple(self._began_s), tuple(self._marks), flights, backward_ended_s)

    def _note(self) -> None:
        self._began_s.append(time.perf_counter())
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)


def _summed(parts: Sequence[str], began_s: Sequence[float]) -> dict[str, float]:
    """Seconds of each part."""
    taken_s: dict[str, float] = defaultdict(float)
    for part, began, ended in zip(parts, began_s, began_s[1:], strict=False):
        taken_s[part] += ended - began
    return taken_s
