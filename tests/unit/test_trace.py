"""A trace's file: what was recorded becomes events on one clock, lanes nest, nothing but a trace is replaced."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from gpumem_nb.engine.tracing import FLIGHTS, HOROVOD, STEPS, horovod_events, step_events, torch_events, window_of
from gpumem_nb.internals.horovod_internals import Activity, read_timeline
from gpumem_nb.internals.torch_internals import read_profile
from gpumem_nb.kernel.questions.tracing import unpacked
from gpumem_nb.report.step_time import behind
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.step_times import BACKWARD, FORWARD, REDUCTION, Lap, StepLanes

Events = list[dict[str, Any]]


def lane(rank: int, step: int, began_s: float) -> StepLanes:
    """A step of three seconds in thirds, with gradients on their way from the middle of the second part on."""
    parts = [
        Lap(name, began_s + place, began_s + place + 1) for place, name in enumerate((FORWARD, BACKWARD, REDUCTION))
    ]
    return StepLanes(rank, step, tuple(parts), (Lap("4.0 MiB", began_s + 1.5, began_s + 2.9),))


def names(events: Events, what: str) -> dict[tuple[int, int], str]:
    """Of processes or of lanes, by their numbers."""
    return {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == what}


def test_a_steps_parts_lie_inside_of_it_in_the_first_lane_and_its_gradients_in_the_second() -> None:
    events = list(step_events([lane(1, 7, 100.0000004), lane(1, 8, 103.1)], "rank 1 (here, GPU)"))
    assert list(names(events, "process_name").values()) == ["rank 1 (here, GPU)"]
    assert list(names(events, "thread_name").values()) == [STEPS, FLIGHTS]
    steps = [one for one in events if one.get("cat") == "step"]
    assert [one["name"] for one in steps] == ["step 7", "step 8"]
    for step in steps:
        assert step["pid"] == step["tid"], "viewers show that lane first"
        own = [one for one in events if one.get("cat") == "part" and step["ts"] <= one["ts"] < step["ts"] + step["dur"]]
        assert [one["name"] for one in own] == [FORWARD, BACKWARD, REDUCTION]
        assert events.index(step) < events.index(own[0]), "what begins together nests in the order of the file"
        ends = [round(one["ts"] + one["dur"], 3) for one in own]
        assert ends[-1] == round(step["ts"] + step["dur"], 3)
    flights = [one for one in events if one.get("cat") == "gradients"]
    assert [(one["ph"], one["args"]["step"] if "args" in one else None) for one in flights] == [
        ("b", 7),
        ("e", None),
        ("b", 8),
        ("e", None),
    ]
    assert len({one["id"] for one in flights}) == 2


def test_a_step_ends_in_its_lane_where_the_next_begins_though_the_gpu_is_still_at_it() -> None:
    events = list(step_events([lane(0, 7, 100.0), lane(0, 8, 101.5)], "rank 0"))
    steps = [(one["ts"], one["dur"]) for one in events if one.get("cat") == "step"]
    assert steps == [(100e6, 1.5e6), (101.5e6, 3e6)]
    parts = [(one["name"], one["dur"]) for one in events if one.get("cat") == "part"]
    assert parts[:2] == [(FORWARD, 1e6), (BACKWARD, 0.5e6)]
    assert len(parts) == 2 + 3, "the reduction came after"


PROFILE = {
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    "traceEvents": [
        {"ph": "M", "name": "thread_name", "ts": 0.0, "pid": 11, "tid": 11, "args": {"name": "thread 11 (python)"}},
        {"ph": "M", "name": "thread_name", "ts": 0.0, "pid": 0, "tid": 7, "args": {"name": "stream 7 "}},
        {"ph": "X", "name": "before", "cat": "cpu_op", "ts": 99.0, "dur": 1, "pid": 11, "tid": 11},
        {"ph": "X", "name": "op", "cat": "cpu_op", "ts": 2e6, "dur": 1, "pid": 11, "tid": 11,
         "args": {"External id": 4, "Sequence number": 5}},
        {"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 3, "ts": 2e6, "pid": 11, "tid": 11},
        {"ph": "X", "name": "kernel", "cat": "kernel", "ts": 2.5e6, "dur": 9.125, "pid": 0, "tid": 7},
        {"ph": "X", "name": "span", "cat": "Trace", "ts": 2e6, "dur": 1, "pid": "Spans", "tid": "PyTorch Profiler"},
    ],
}  # fmt: skip


def test_torchs_events_are_on_the_steps_clock_in_lanes_of_their_rank() -> None:
    zero_ns = 1_699_999_900_000_000_000  # the clock began a hundred seconds before the profile's base
    profile = read_profile(json.dumps(PROFILE), zero_ns)
    window = window_of([lane(1, 7, 101.0), lane(1, 8, 104.0)])
    assert window == (101e6, 107e6)
    of_rank = {rank: list(torch_events(profile, rank, window)) for rank in (0, 1)}
    for events in of_rank.values():
        found = {one["name"]: one for one in events if one["ph"] != "M"}
        assert list(found) == ["op", "ac2g", "kernel"], "what lies outside of the steps is left out"
        assert (found["op"]["ts"], found["kernel"]["ts"]) == (102e6, 102.5e6)
        assert found["op"]["args"] == {"Sequence number": 5}
        lanes = names(events, "thread_name")
        assert [lanes[one["pid"], one["tid"]] for one in (found["op"], found["kernel"])] == ["main thread", "stream 7"]
    assert not {one["pid"] for one in of_rank[0]} & {one["pid"] for one in of_rank[1]}
    assert not {one["tid"] for one in of_rank[0]} & {one["tid"] for one in of_rank[1]}
    assert not {one.get("id") for one in of_rank[0]} & {one.get("id") for one in of_rank[1]} - {None}


TIMELINE = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":5000}},
{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "a_1of2"}},
{"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "a_2of2"}},
{"ph": "E", "ts": 5, "pid": 1},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 10, "pid": 1},{"ph": "X", "name": "0", "ts": 11, "pid": 1, "dur": 0},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 12, "pid": 2},{"ph": "X", "name": "0", "ts": 12, "pid": 2, "dur": 0},
{"ph": "E", "ts": 20, "pid": 1},{"ph": "E", "ts": 21, "pid": 2},
{"ph": "B", "name": "ALLREDUCE", "ts": 22, "pid": 1},{"ph": "B", "name": "ALLREDUCE", "ts": 23, "pid": 2},
{"ph": "B", "name": "MPI_ALLREDUCE", "ts": 24, "pid": 1},{"ph": "B", "name": "MPI_ALLREDUCE", "ts": 24, "pid": 2},
{"ph": "E", "ts": 30, "pid": 1},{"ph": "E", "ts": 31, "pid": 2},
{"ph": "E", "ts": 32, "pid": 1, "args": {"dtype": "float32"}},{"ph": "E", "ts": 33, "pid": 2},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 40, "pid": 1},{"ph": "E", "ts": 41, "pid": 1},
{"ph": "B", "name": "ALLREDUCE", "ts": 90, "pid": 1}]"""


def test_horovods_timeline_is_read_with_what_is_closed_on_the_same_clock() -> None:
    found = list(read_timeline(TIMELINE, 2000.0))
    assert Activity("a_1of2", "rank 0 is ready", 3011.0, 3011.0, {}) in found
    assert Activity("a_2of2", "NEGOTIATE_ALLREDUCE", 3012.0, 3021.0, {}) in found
    assert Activity("a_1of2", "ALLREDUCE", 3022.0, 3032.0, {"dtype": "float32"}) in found
    assert [one.name for one in found].count("ALLREDUCE") == 2, "one is not over, one has no begin"
    assert not list(read_timeline("", 2000.0)), "nothing happened"


def test_what_travels_together_is_one_lane_of_horovods_process() -> None:
    events = list(horovod_events(read_timeline(TIMELINE, 2000.0), 2, (3000.0, 3100.0)))
    assert list(names(events, "process_name").values()) == [HOROVOD]
    assert list(names(events, "thread_name").values()) == ["a"]
    found = [(one["name"], one["ts"], one.get("dur"), one["args"].get("tensors")) for one in events if one["ph"] != "M"]
    assert found == [
        ("NEGOTIATE_ALLREDUCE", 3010, 11, 2),
        ("rank 0 is ready", 3011, None, None),
        ("ALLREDUCE", 3022, 11, 2),
        ("MPI_ALLREDUCE", 3024, 7, 2),
        ("NEGOTIATE_ALLREDUCE", 3040, 1, 1),
    ]
    late = horovod_events(read_timeline(TIMELINE, 2000.0), 2, (3020.0, 3100.0))
    assert "rank 0 is ready" not in {one["name"] for one in late}, "what began before the steps is left out"


def test_a_hosts_clock_is_behind_by_what_its_ranks_left_the_reduction_earlier() -> None:
    lanes = [lane(0, 7, 100.0), lane(1, 7, 100.25), lane(2, 7, 4000.0)]
    assert behind(lanes, ["here", "here", "there"]) == {0: 0.0, 1: 0.0, 2: 103.25 - 4003.0}


def test_the_part_of_a_rank_is_unpacked_whole_or_refused() -> None:
    text = b"some events " * 10_000
    packed = gzip.compress(text)

    def read(there: bytes) -> bytes:
        return b"".join(unpacked(1, len(packed), lambda offset: there[offset : offset + 7]))

    assert read(packed) == text
    for there in (packed[:-9], packed[:40], b"", packed[:20] + b"?" * (len(packed) - 20)):
        with pytest.raises(WorkloadError, match=r"The part of rank 1 is cut short or damaged: \d+ of \d+ bytes"):
            read(there)
