"""The recording of a rank, as events of the Chrome trace format; times in microseconds by the host's clock.

A rank is a process there. Its first lane has the steps and their parts, the second its gradients on their way, those
below are torch's: a lane for each thread and each stream of a GPU. Horovod's timeline is a process of its own with a
lane for each collective, as rank 0 writes it for all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...internals.horovod_internals import Activity
from ...shared.step_times import MEANING, Lap, StepLanes

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
