"""The kernel's questions about this rank's device."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..memory import cuda
from ..memory.device import opened
from ..shared.categories import OTHER
from ..shared.messages import DeviceUse, Freed, Reading
from ..shared.readings import LiveBytes
from .held import LiveHolders

if TYPE_CHECKING:
    from .step.trainer import Trainer

_use: DeviceUse | None = None  # as NVML had it when it was last asked


def reading() -> Reading:
    """Return the device's memory right now."""
    return opened().reading()


def device_use() -> DeviceUse | None:
    """Return what NVML says of the device right now; takes milliseconds, and chunks send on what it said."""
    global _use
    _use = None  # should this fail, the next chunk does not send on what was true before
    _use = opened().use()
    return _use


def latest_use() -> DeviceUse | None:
    """Return what NVML said when it was asked last."""
    return _use


def look() -> tuple[Reading, DeviceUse | None]:
    """Return all that can be read of the device right now."""
    use = device_use()
    return reading(), use


def free(trainer: Trainer | None, variables: Mapping[str, Any]) -> Freed:
    """Give cached memory that no tensor uses back to the device, and say what holds the rest.

    Args:
        trainer: of what is loaded.
        variables: of cells.
    """
    device, before = opened(), reading()
    gc.collect()  # what hangs together in circles is held by nothing
    device.empty_cache()
    after, live = reading(), live_bytes(trainer, variables)
    device_use()
    return Freed(before, after, live)


def live_bytes(trainer: Trainer | None, variables: Mapping[str, Any]) -> LiveBytes:
    """Return what holds the live bytes right now: what is trained, and these variables of cells."""
    held, live = LiveHolders(opened(), trainer, variables), reading().live_bytes
    known = sum(held.by_category.values()) + sum(nbytes for _, nbytes in held.variables)
    held.by_category[OTHER] = held.by_category.get(OTHER, 0) + max(0, live - known)
    return LiveBytes(held.by_category, held.variables, held.with_graph)


def record_allocations(enabled: bool) -> None:
    """Begin or end the history that a GPU's memory snapshot shows."""
    cuda.record_allocations(enabled)


def write_snapshot(path: str) -> None:
    """Write torch's own snapshot of this rank's GPU memory."""
    cuda.write_snapshot(path)
