"""What the kernel can ask about this rank's device."""

from __future__ import annotations

from ..memory import cuda
from ..memory.device import opened
from ..shared.messages import DeviceUse, Reading

_use: DeviceUse | None = None  # as NVML had it when it was last asked


def reading() -> Reading:
    """The device's memory right now."""
    return opened().reading()


def device_use() -> DeviceUse | None:
    """What NVML says of the device right now; takes milliseconds, and chunks send on what it said."""
    global _use
    _use = None  # should this fail, the next chunk does not send on what was true before
    _use = opened().use()
    return _use


def latest_use() -> DeviceUse | None:
    """What NVML said when it was asked last."""
    return _use


def look() -> tuple[Reading, DeviceUse | None]:
    """All that can be read of the device right now."""
    use = device_use()
    return reading(), use


def record_allocations(enabled: bool) -> None:
    """Begin or end the history that a GPU's memory snapshot shows."""
    cuda.record_allocations(enabled)


def write_snapshot(path: str) -> None:
    """Write torch's own snapshot of this rank's GPU memory."""
    cuda.write_snapshot(path)
