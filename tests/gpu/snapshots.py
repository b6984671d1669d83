"""What torch's own snapshots of the caching allocator tell, as events that the model of it can replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def events_of(before: Mapping[str, Any], after: Mapping[str, Any], device: int) -> list[int]:
    """Return what happened on a device between two of ``torch.cuda.memory._snapshot()``, while history was recorded.

    What was held before comes first, in the order of addresses, because how it came to be is not known. A release
    counts when the block can be used again (``free_completed``), not when it was asked for. 0 stands for cached
    segments that went back to the device.
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
        elif entry["action"] == "segment_free" and events and events[-1]:
            events.append(0)
    return events
