"""The time for which a thread was ready to run without a core, as Linux counts it (proc(5), ``schedstat``)."""

from __future__ import annotations

import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ...shared.step_times import BACKWARD, DATA, REDUCTION, TOOLKIT, Lap, StepLanes, StepTimes
from ...shared.units import format_bytes

_LONGEST = 80  # three whole numbers


class CoreQueue:
    """Of the thread that makes it. Reading takes some microseconds."""

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    def waited_s(self) -> float | None:
        """Since the thread began; ``None`` where the system does not tell."""
        if self._file is None:
            return None
        with suppress(OSError, ValueError):
            ran_ns, waited_ns, _ = os.pread(self._file, _LONGEST, 0).split()
            return int(waited_ns) / 1e9 if int(ran_ns) else None
        return None


UNDOING = "undoing"  # a part of the toolkit's share that no step has but those that may have to be undone
_END = ""


@dataclass(frozen=True, slots=True)
class BucketTransfer:
    """One bucket of gradients on its way; times as :func:`time.perf_counter` has them.

    ``arrived_s`` is when that was noticed: with the next gradient, or after backward. Each rank has a bucket with this
    number. On GPUs ``sent`` is an event of the stream that made its gradients: the process is done with backward long
    before the device is, so ``sent_s`` only says when it left the process.
    """

    bytes: int
    sent_s: float
    arrived_s: float
    bucket: int
    sent: Any = None


def event_here(device: torch.device) -> Any:
    """Return an event of the stream that is a GPU's current one, with its time; ``None`` for other devices."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class _Mark(NamedTuple):
    """The begin of a part: by the process's clock, and on GPUs by an event of the device's.

    ``cpu_s`` is how long the thread had computed by then, where a wait for data begins or ends: the system is asked,
    which takes longer than all else here. ``idle``: the device was done with all before, so both clocks
    meet here.
    """

    part: str
    began_s: float
    event: Any = None
    cpu_s: float = 0.0
    idle: bool = False


@dataclass(frozen=True, slots=True)
class StepTimings:
    """The parts of one step in the order in which they came, each ended by the next.

    Attributes:
        marks: where each begins; the last one is the end.
        transfers: of its gradients.
        queued_s: as :class:`StepTimes` has it.
    """

    marks: Sequence[_Mark]
    transfers: Sequence[BucketTransfer] = ()
    queued_s: float | None = None

    @property
    def of_device(self) -> bool:
        """Return whether the parts are times of a GPU."""
        return self.marks[0].event is not None

    @property
    def step_s(self) -> float:
        """Return how long the step took the process."""
        return self.marks[-1].began_s - self.marks[0].began_s

    def times(self) -> StepTimes | None:
        """Return the time of each part; on GPUs wait until the device is done with the step, ``None`` if that fails."""
        with suppress(RuntimeError):  # of CUDA; the steps count whether or not they could be timed
            laps = self._laps()
            known = not self.of_device or any(mark.idle for mark in self.marks)
            hidden_s = _hidden_s(laps, self._travelled()) if known else None
            return StepTimes.of(_summed(laps), hidden_s, self._data_cpu_s, self.queued_s, self.of_device)
        return None

    def lanes(self, rank: int, step: int) -> StepLanes:
        """Return the same as it happened, by the process's clock; on GPUs parts are the device's."""
        laps, travelled = tuple(self._laps()), self._travelled()
        transfers = (Lap(format_bytes(one.bytes), one.sent_s, one.arrived_s, one.bucket) for one in travelled)
        return StepLanes(rank, step, laps, tuple(transfers))

    def _laps(self) -> list[Lap]:
        return [replace(lap, name=TOOLKIT) if lap.name == UNDOING else lap for lap in _laps(self.marks)]

    def _travelled(self) -> list[BucketTransfer]:
        """Return the transfers by the process's clock: on GPUs gradients left when the device had made them."""
        began_s = _clock_of(self.marks)
        sent_s = (one.sent_s if one.sent is None else began_s(one.sent) for one in self.transfers)
        return [replace(one, sent_s=left_s) for one, left_s in zip(self.transfers, sent_s, strict=True)]

    @property
    def _data_cpu_s(self) -> float:
        return sum(after.cpu_s - mark.cpu_s for mark, after in pairwise(self.marks) if mark.part == DATA)


def _clock_of(marks: Sequence[_Mark]) -> Callable[[Any], float]:
    """Return what gives the time of a device's event by the process's clock, of those that the device is done with.

    Both are the same where the process has seen the device idle, or, without such a mark, where the step began.
    """
    first, anchor = marks[0], next((mark for mark in reversed(marks) if mark.idle), marks[0])
    ahead_ms = first.event.elapsed_time(anchor.event) if first.event and anchor is not first else 0.0
    return lambda event: float(anchor.began_s + (first.event.elapsed_time(event) - ahead_ms) / 1000)


def _laps(marks: Sequence[_Mark]) -> list[Lap]:
    """Return the parts between marks; on GPUs wait until the device has come to the last."""
    began_s = [mark.began_s for mark in marks]
    if marks[0].event:
        marks[-1].event.synchronize()
        began_s = list(map(_clock_of(marks), (mark.event for mark in marks)))
    return [Lap(mark.part, *ends) for mark, ends in zip(marks, pairwise(began_s), strict=False)]


def _hidden_s(laps: Sequence[Lap], transfers: Sequence[BucketTransfer]) -> float:
    """Time in which gradients were on their way while backward went on, and did not wait: they may overlap."""
    backward_ended_s = max((lap.ended_s for lap in laps if lap.name == BACKWARD), default=0.0)
    hidden_s, until_s = 0.0, 0.0
    for transfer in sorted(transfers, key=lambda transfer: transfer.sent_s):
        end_s = min(transfer.arrived_s, backward_ended_s)
        hidden_s += max(0.0, end_s - max(transfer.sent_s, until_s))
        until_s = max(until_s, end_s)
    waits = (lap for lap in laps if lap.name == REDUCTION and lap.ended_s <= backward_ended_s)
    return max(0.0, hidden_s - sum(lap.ended_s - lap.began_s for lap in waits))


class StepClock:
    """Follows one step after the other; parts leave no gaps.

    Args:
        device: whose time counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None  # on GPUs that of the whole step: only events of one stream can be compared
        self._marks: list[_Mark] = []
        self._queue = CoreQueue()
        self._queued_s: float | None = None  # when the step began

    def begin(self) -> None:
        """A step begins, with what the toolkit does first."""
        self._marks = []
        self._queued_s = self._queue.waited_s()
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        self.enter(TOOLKIT)

    def enter(self, part: str, idle: bool = False) -> None:
        """A part begins, and the one before ends; ``idle``: the device is known to be done with all before."""
        self._marks.append(self._mark(part, idle))

    def _mark(self, part: str, idle: bool = False) -> _Mark:
        event = None
        if self._stream is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
        of_data = part == DATA or bool(self._marks and self._marks[-1].part == DATA)
        return _Mark(part, time.perf_counter(), event, time.thread_time() if of_data else 0.0, idle)

    def until_now(self) -> tuple[float, float]:
        """Return what the step took until now: its work, without copies to undo it, and its wait for data, in seconds.

        On GPUs wait until the device has come here.
        """
        taken_s = _summed(_laps([*self._marks, self._mark(_END)]))
        return sum(seconds for part, seconds in taken_s.items() if part not in (DATA, UNDOING)), taken_s[DATA]

    def end(self, transfers: Sequence[BucketTransfer]) -> StepTimings:
        """Return the step is over."""
        self.enter(_END)
        queued_s = self._queue.waited_s()
        if queued_s is not None and self._queued_s is not None:
            queued_s -= self._queued_s
        return StepTimings(tuple(self._marks), tuple(transfers), queued_s)


def _summed(laps: Sequence[Lap]) -> dict[str, float]:
    """Seconds of each part."""
    taken_s: dict[str, float] = defaultdict(float)
    for lap in laps:
        taken_s[lap.name] += lap.ended_s - lap.began_s
    return taken_s
