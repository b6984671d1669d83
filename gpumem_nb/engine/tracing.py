"""Steps that are recorded on a rank, as events of the Chrome trace format; times in microseconds by the host's clock.

torch's profiler and Horovod's timeline are on for these steps, and for nothing else. A rank is a process in the trace.
Its first lane has the steps and their parts, the second its gradients on their way, those below are torch's: a lane for
each thread and each stream of a GPU. Horovod's timeline is a process of its own with a lane for each collective, as
rank 0 writes it for all.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from ..internals.horovod_internals import Activity, read_timeline
from ..internals.torch_internals import profiles, read_profile
from ..shared.questions import BETWEEN, TIMELINE, TraceOrder, TracePart
from ..shared.step_times import MEANING, Lap, StepLanes
from .link.communicator import here
from .link.horovod import stop_timeline
from .link.signals import interruptible

Event = dict[str, Any]
STEPS, FLIGHTS = "steps and their parts", "gradients on their way"
HOROVOD = "Horovod's timeline, as rank 0 sees it"
# Viewers put the thread whose number is that of its process first, and tell threads apart by their numbers alone.
_LANES = 2**16  # of a process, at most
_IDS = 2**32  # of the arrows of a process
_OF_MANY = re.compile(r"_(\d+)of\d+$")  # how Horovod numbers the tensors of one collective
_NOISE = ("External id", "Record function id", "Ev Idx")


def step_events(lanes: Sequence[StepLanes], title: str) -> Iterator[Event]:
    """Yield the steps of a rank with their parts, its gradients, and what the rank is called."""
    rank = lanes[0].rank
    yield from _process(rank, title)
    yield from _lane(rank, 0, STEPS)
    yield from _lane(rank, 1, FLIGHTS)
    for lane, after in zip(lanes, [*lanes[1:], None], strict=True):
        # A GPU may still be at a step's end when the process begins the next one: viewers leave out what overlaps.
        until_s = after.parts[0].began_s if after else math.inf
        whole = Lap(f"step {lane.step}", lane.parts[0].began_s, min(lane.parts[-1].ended_s, until_s))
        yield _slice(rank, 0, "step", whole, {})  # before its parts: viewers nest what begins together in this order
        for part in lane.parts:
            if part.began_s < until_s:
                cut = Lap(part.name, part.began_s, min(part.ended_s, until_s))
                yield _slice(rank, 0, "part", cut, {"what": MEANING[part.name]})
        for number, transfer in enumerate(lane.transfers):  # which overlap
            common: Event = {"cat": "gradients", "id": f"{rank}.{lane.step}.{number}", "name": transfer.name}
            common |= {"pid": _pid(rank), "tid": _pid(rank) + 1}
            yield common | {"ph": "b", "ts": _us(transfer.began_s), "args": {"step": lane.step}}
            yield common | {"ph": "e", "ts": _us(transfer.ended_s)}


def torch_events(profile: Iterable[Event], rank: int, window: tuple[float, float]) -> Iterator[Event]:
    """Yield what torch's profiler noted between two moments, in lanes of the rank's process."""
    numbers: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any], str] = {}
    for event in profile:
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[place] = "main thread" if place[0] == place[1] else str(event["args"]["name"]).strip()
        elif isinstance(place[0], int) and event["ph"] in "Xsft" and window[0] <= event["ts"] <= window[1]:
            number = numbers.setdefault(place, len(numbers) + 2)
            moved = event | {"pid": _pid(rank), "tid": _pid(rank) + number}
            if "id" in event:
                moved["id"] = rank * _IDS + int(event["id"])
            if "args" in event:
                moved["args"] = {name: value for name, value in event["args"].items() if name not in _NOISE}
            yield moved
    for place, number in numbers.items():
        yield from _lane(rank, number, names.get(place, f"thread {place[1]}"))


def horovod_events(activities: Iterable[Activity], ranks: int, window: tuple[float, float]) -> Iterator[Event]:
    """Yield the events of Horovod's timeline between two moments; its process comes after those of all ranks."""
    yield from _process(ranks, HOROVOD)
    numbers: dict[str, int] = {}
    inside = [one for one in activities if window[0] <= one.began_us and one.ended_us <= window[1]]
    for one in sorted(_together(inside), key=lambda one: (one.began_us, -one.ended_us)):
        number = numbers.setdefault(one.tensor, len(numbers))
        common = {"cat": "horovod", "name": one.name, "ts": one.began_us, "pid": _pid(ranks)}
        common |= {"tid": _pid(ranks) + number, "args": one.details}
        if one.ended_us == one.began_us:
            yield common | {"ph": "i", "s": "t"}
        else:
            yield common | {"ph": "X", "dur": one.ended_us - one.began_us}
    for collective, number in numbers.items():
        yield from _lane(ranks, number, collective)


def window_of(lanes: Sequence[StepLanes]) -> tuple[float, float]:
    """From the begin of the first of these steps to the end of the last."""
    return _us(lanes[0].parts[0].began_s), _us(lanes[-1].parts[-1].ended_s)


def moved(event: Event, later_us: float) -> Event:
    """Return the same, so many microseconds later."""
    return event | {"ts": round(event["ts"] + later_us, 3)} if "ts" in event else event


def _together(activities: Sequence[Activity]) -> Iterator[Activity]:
    """Yield what Horovod notes for each tensor of a collective, once: they go through the same together."""
    latest: dict[tuple[str, str], Activity] = {}
    for one in sorted(activities, key=lambda one: one.began_us):
        number = _OF_MANY.search(one.tensor)
        if not number:
            yield one
            continue
        whole = replace(one, tensor=one.tensor[: number.start()], details={"tensors": 1})
        before = latest.get((whole.tensor, whole.name))
        if one.began_us == one.ended_us:
            if number[1] == "1":  # a rank is ready for all of them at once
                yield replace(whole, details={})
        elif before and one.began_us <= before.ended_us:
            before.details["tensors"] += 1
            ended_us = max(before.ended_us, one.ended_us)
            latest[whole.tensor, whole.name] = replace(before, ended_us=ended_us)
        else:
            latest[whole.tensor, whole.name] = whole
            if before:
                yield before
    yield from latest.values()


def _slice(rank: int, lane: int, category: str, lap: Lap, args: dict[str, Any]) -> Event:
    began_us = _us(lap.began_s)  # both ends are rounded, and not how long it took: nothing may stick out of its step
    duration_us = round(_us(lap.ended_s) - began_us, 3)
    place = {"pid": _pid(rank), "tid": _pid(rank) + lane}
    return {"ph": "X", "cat": category, "name": lap.name, "ts": began_us, "dur": duration_us, "args": args, **place}


def _process(number: int, name: str) -> Iterator[Event]:
    pid = _pid(number)
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": pid, "args": {"sort_index": number}}


def _lane(process: int, number: int, name: str) -> Iterator[Event]:
    pid = _pid(process)
    place = {"ph": "M", "pid": pid, "tid": pid + number}
    yield place | {"name": "thread_name", "args": {"name": name}}
    yield place | {"name": "thread_sort_index", "args": {"sort_index": number}}


def _pid(number: int) -> int:
    return (number + 1) * _LANES


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


PIECE_BYTES = 4 * 2**20
_MICRO = 10**6


class Tracer:
    """The recorder of one rank, in a folder of its own that is gone with the cluster at the latest.

    Args:
        rejoin: shuts Horovod down and joins the other ranks again, which takes some milliseconds.
        on_gpu: whether this rank computes on one.
    """

    def __init__(self, rejoin: Callable[[], None], on_gpu: bool) -> None:
        self._rejoin = rejoin
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._folder: Path | None = None
        self._lanes: Sequence[StepLanes] = ()
        self._zero_ns = 0  # of the clock that lanes have, in nanoseconds since 1970
        self._problem = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, everything is recorded. All ranks come here together."""
        self.drop()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="trace.", dir=os.environ["IPP_PROFILE_DIR"]))
        except OSError as error:
            self._problem = f"no folder for it could be made ({error})"
        with self._profiled(), self._timeline():  # Horovod last: joining anew lets all ranks begin together
            yield

    def took(self, lanes: Sequence[StepLanes]) -> None:
        """These steps were recorded; without any there is nothing to keep."""
        self._lanes = lanes
        if not lanes:
            self.drop()

    def write(self, order: TraceOrder) -> TracePart:
        """Write this rank's part for :meth:`read`; a problem says why there is none."""
        if self._problem or self._folder is None:
            return TracePart(problem=self._problem or "nothing was recorded")
        file, count = self._folder / "part.gz", 0
        later_us = _MICRO * (order.later_s[self._lanes[0].rank] - order.origin_s)
        try:
            with interruptible(), gzip.open(file, "wb", compresslevel=3) as part:
                for count, event in enumerate(self._events(self._folder, order), 1):
                    part.write((BETWEEN if count > 1 else b"") + _as_json(moved(event, later_us)))
            return TracePart(count, file.stat().st_size)
        except (OSError, ValueError) as error:
            return TracePart(problem=f"what was recorded cannot be read or written ({error})")

    def read(self, offset: int) -> bytes:
        """Return a piece of what was written, from there on."""
        assert self._folder
        with open(self._folder / "part.gz", "rb") as part:
            part.seek(offset)
            return part.read(PIECE_BYTES)

    def drop(self) -> None:
        """Keep nothing of what was recorded."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._lanes, self._problem = None, (), ""

    def _events(self, folder: Path, order: TraceOrder) -> Iterable[Event]:
        rank, window = self._lanes[0].rank, window_of(self._lanes)
        yield from step_events(self._lanes, order.titles[rank])
        yield from torch_events(read_profile((folder / "torch.json").read_text(), self._zero_ns), rank, window)
        if rank == 0:
            timeline = read_timeline((folder / "horovod.json").read_text(), self._zero_ns / 1000)
            yield from horovod_events(timeline, len(order.titles), window)

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its log is that of the ranks, which is read when one dies
        profiler, begun = profile(activities=self._activities), False
        if profiles():
            self._problem = "torch's profiler is on there already. Let the cell that began it end it: prof.stop()"
        elif self._folder:
            with self._noting_problems("torch's profiler could not begin"):
                profiler.start()
                begun = True
        try:
            yield
        finally:
            if begun and self._folder:
                with self._noting_problems("torch's profiler could not end"):
                    profiler.stop()
                    # A process that is paused between the two finds less than there is.
                    self._zero_ns = max(time.time_ns() - time.perf_counter_ns() for _ in range(5))
                    profiler.export_chrome_trace(str(self._folder / "torch.json"))

    @contextmanager
    def _noting_problems(self, what: str) -> Iterator[None]:
        """An error inside is not a reason to fail a step."""
        try:
            yield
        except Exception as error:
            self._problem = f"{what} ({type(error).__name__}: {error})"

    @contextmanager
    def _timeline(self) -> Iterator[None]:
        before = os.environ.get(TIMELINE)
        try:
            self._join_with(str(self._folder / "horovod.json") if self._folder else os.devnull)
            yield
        finally:
            self._join_with(before)

    def _join_with(self, timeline: str | None) -> None:
        """Let Horovod write its timeline there from now on, or nowhere.

        Ranks that have come apart are left apart: the kernel joins them, and Horovod reads its environment then.
        """
        try:
            here().any_rank(False, "trace")
            stop_timeline()  # what is not written yet would be lost
            together = True
        except (RuntimeError, ValueError):
            together = False
        if timeline is None:
            os.environ.pop(TIMELINE, None)
        else:
            os.environ[TIMELINE] = timeline
        if together:
            self._rejoin()


def _as_json(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()
