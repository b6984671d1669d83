"""Recorded allocations, replayed by the virtual GPU's model of the caching allocator: how much would it reserve?

Events are whole numbers: ``n`` allocates n bytes, ``-k`` releases the k-th allocation, counted from 1. So a trace is a
list that fits into a JSON file, without addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...shared.allocator_settings import DEFAULT, AllocatorSettings
from ...shared.errors import InvalidInput
from .gpu import CConfig, Ints, library, pointer

NOTHING_HELD = np.empty((0, 3), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The end and the peaks of a replay; ``live_bytes`` as asked for, not rounded.

    ``within_limit``: whether the limit would have allowed every allocation, perhaps with free segments given back.
    """

    live_bytes: int
    live_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    within_limit: bool


class _CReplayed(ctypes.Structure):
    """``GpumemReplayed`` of replay.cpp."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("live", "live_peak", "reserved", "reserved_peak", "over_limit")]
    live: int
    live_peak: int
    reserved: int
    reserved_peak: int
    over_limit: int


def replay(
    events: Sequence[int],
    limit_bytes: int | None = None,
    allocator: AllocatorSettings = DEFAULT,
    layout: Ints = NOTHING_HELD,
    allowed_bytes: int | None = None,
) -> Replayed:
    """Follow recorded events with an empty cache; tensors of this process are not touched.

    Args:
        events: what was allocated and released.
        limit_bytes: of what may be reserved; ``None`` for no limit.
        allocator: how the caching allocator is set.
        layout: what it holds at the beginning, without free segments: a row for each block, in the order of
            addresses. Its bytes; the allocation in it, numbered from 1 as events count them, or 0 for a free one and -1
            for one without memory; its kind as a sum: 1 small, 2 expandable, 4 the first of a segment.
        allowed_bytes: of which ``garbage_collection_threshold`` is a share; 0 for never, ``None`` for the limit.

    Raises:
        InvalidInput: an event that releases what is not allocated.
        SetupError: the virtual GPU's library cannot be built.
    """
    out = _CReplayed()
    given, held = np.array(events, dtype=np.int64), np.ascontiguousarray(layout)
    config = CConfig.of(allocator)
    streams = (pointer(given), len(given), pointer(held), held.size)
    limits = (limit_bytes or 0, (limit_bytes or 0) if allowed_bytes is None else allowed_bytes)
    followed = library().gpumem_replay(*streams, *limits, ctypes.byref(config), ctypes.byref(out))
    if followed < len(events):
        raise InvalidInput(
            f"The trace cannot be followed: event {followed} is {events[followed]}, which releases nothing that is "
            "allocated. n > 0 allocates n bytes, -k releases the k-th allocation."
        )
    return Replayed(out.live, out.live_peak, out.reserved, out.reserved_peak, not out.over_limit)


def events_of(before: Mapping[str, Any], after: Mapping[str, Any], device: int) -> list[int]:
    """Return what happened on a device between two of ``torch.cuda.memory._snapshot()``, while history was recorded.

    What was held before comes first, in the order of addresses, because how it came to be is not known. A release
    counts when the block can be used again (``free_completed``), not when it was asked for.
    """
    held = [
        (block["address"], block["requested_size"])
        for segment in before["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    events = [size for _, size in held]
    numbers = {address: number for number, (address, _) in enumerate(held, start=1)}
    allocations = len(held)
    for entry in after["device_traces"][device]:
        if entry["action"] == "alloc":
            allocations += 1
            numbers[entry["addr"]] = allocations
            events.append(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in numbers:
            events.append(-numbers.pop(entry["addr"]))
    return events
