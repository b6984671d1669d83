"""Traces from torch's snapshots, and what the model of the caching allocator makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from gpumem_nb.memory.virtual_gpu.gpu import Replayed, replay
from gpumem_nb.shared.errors import InvalidInput
from tests.gpu.snapshots import events_of

MIB = 2**20
SMALL, MIDDLE = 2 * MIB, 20 * MIB  # segments for up to 1 MiB, and for up to 10 MiB


@pytest.mark.parametrize(
    ("events", "live", "live_peak", "reserved"),
    [
        ([], 0, 0, 0),
        ([100], 100, 100, SMALL),
        ([100, -1], 0, 100, SMALL),
        ([MIB, MIB, MIB], 3 * MIB, 3 * MIB, 2 * SMALL),
        ([MIB + 1, 100], MIB + 101, MIB + 101, MIDDLE + SMALL),
        ([30 * MIB, -1, 30 * MIB], 30 * MIB, 30 * MIB, 30 * MIB),
        ([30 * MIB, 31 * MIB, -1, 5 * MIB], 36 * MIB, 61 * MIB, 62 * MIB),
        ([30 * MIB, -1, 0, 12 * MIB], 12 * MIB, 30 * MIB, 12 * MIB),
    ],
)
def test_a_trace_is_followed_as_the_caching_allocator_would(
    events: list[int], live: int, live_peak: int, reserved: int
) -> None:
    reserved_peak = max(reserved, 30 * MIB) if 0 in events else reserved
    assert replay(events) == Replayed(live, live_peak, reserved, reserved_peak, True)


@pytest.mark.parametrize(("events", "place"), [([100, -2], 1), ([100, -1, -1], 2), ([0, -1], 1)])
def test_a_release_of_nothing_is_refused_and_named(events: list[int], place: int) -> None:
    with pytest.raises(InvalidInput, match=f"event {place} is {events[place]}"):
        replay(events)


def block(address: int, size: int, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size + 512, "requested_size": size, "state": state, "frames": []}


def entry(action: str, addr: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 0}


def test_a_trace_is_what_was_held_before_and_what_happened_since() -> None:
    before = {
        "segments": [
            {"device": 1, "blocks": [block(10, 700), block(20, 50, "inactive"), block(30, 800)]},
            {"device": 0, "blocks": [block(10, 999)]},
        ],
        "device_traces": [[], []],
    }
    after = {
        "segments": [],
        "device_traces": [
            [entry("alloc", 10, 999)],
            [
                entry("free_completed", 5, 40),  # from before the recording, of a block that was awaiting its end
                entry("segment_alloc", 90, SMALL),
                entry("alloc", 90, 100),
                entry("free_requested", 10, 700),
                entry("alloc", 95, 200),
                entry("free_completed", 10, 700),
                {"action": "oom", "device_free": 3, "size": 1, "stream": 0, "time_us": 0},
                entry("free_requested", 90, 100),
                entry("free_completed", 90, 100),
                entry("alloc", 90, 300),  # an address used again is another allocation
                entry("free_completed", 90, 300),
                entry("segment_free", 90, SMALL),
                entry("segment_free", 95, SMALL),
                entry("snapshot", 0, 0),
            ],
        ],
    }
    assert events_of(before, after, device=1) == [700, 800, 100, 200, -1, -3, 300, -5, 0]
