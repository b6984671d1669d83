"""An NVML with a few GPUs of every sort: the functions of the real pynvml answer for them, as the library would.

Structures, constants and errors are pynvml's own, so that what the toolkit reads is what it would get. Functions that
are not given here stay the real ones, which raise without a driver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

GIB = 2**30
MIB = 2**20


@dataclass(eq=False)
class Gpu:
    """A GPU or a MIG instance, which is its own handle; ``broken`` names functions and the error that each raises."""

    uuid: str
    used: int = 3 * GIB
    total: int = 16 * GIB
    compute: dict[int, int | None] = field(default_factory=dict)
    graphics: dict[int, int | None] = field(default_factory=dict)
    utilisation: int = 37
    temperature: int = 61
    milliwatts: int = 251_430
    clock_mhz: int = 1410
    fan_percent: int = 44
    broken: dict[str, type[Exception]] = field(default_factory=dict)
    split: bool = False
    parts: list[Gpu | None] = field(default_factory=list)  # None: a number without an instance
    whole: Gpu | None = None

    def __post_init__(self) -> None:
        for part in filter(None, self.parts):
            part.whole = self


def lost(uuid: str) -> Gpu:
    """A GPU that fell off the bus: every question about it fails, the one for its handle first."""
    return Gpu(uuid, broken=dict.fromkeys(FUNCTIONS, pynvml.NVMLError_GpuIsLost))


def bare(uuid: str) -> Gpu:
    """A GPU that reports its memory and nothing else, as consumer and embedded ones may."""
    asked = set(FUNCTIONS) - {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID", "nvmlDeviceGetHandleByIndex", BY_UUID}
    return Gpu(uuid, broken=dict.fromkeys(asked, pynvml.NVMLError_NotSupported))


class FakeNvml:
    """Answers in the place of pynvml's functions for ``gpus``, in the order of the bus."""

    def __init__(self, gpus: list[Gpu]) -> None:
        self.gpus = gpus
        self.opened = 0
        self.broken: type[Exception] | None = None  # what nvmlInit raises

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer from now on, to whoever imported pynvml."""
        for name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlSystemGetDriverVersion"):
            monkeypatch.setattr(pynvml, name, getattr(self, name))
        for name in FUNCTIONS:
            monkeypatch.setattr(pynvml, name, self._guarded(name))

    def _guarded(self, name: str) -> Callable[..., Any]:
        answer = getattr(self, name)

        def ask(subject: Any, *arguments: Any) -> Any:
            if not self.opened:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            device = subject
            if name == BY_UUID:
                device = next((gpu for gpu in self._all() if gpu.uuid == subject), None)
            elif name == "nvmlDeviceGetHandleByIndex":
                device = self.gpus[subject] if subject < len(self.gpus) else None
            if isinstance(device, Gpu) and name in device.broken:
                raise device.broken[name]()
            return answer(subject, *arguments)

        return ask

    def _all(self) -> list[Gpu]:
        return [each for gpu in self.gpus for each in (gpu, *gpu.parts) if each]

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.broken()
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        if not self.opened:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if index >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        for gpu in self._all():
            if gpu.uuid == uuid:
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        if gpu.whole:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        mode = pynvml.NVML_DEVICE_MIG_ENABLE if gpu.split else pynvml.NVML_DEVICE_MIG_DISABLE
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7 if gpu.split else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:
        part = gpu.parts[index] if index < len(gpu.parts) else None
        if part is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return part

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: Gpu) -> Gpu:
        if not gpu.whole:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return gpu.whole

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return pynvml.c_nvmlMemory_t(total=gpu.total, free=gpu.total - gpu.used, used=gpu.used)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [_process(*each) for each in gpu.compute.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [_process(*each) for each in gpu.graphics.items()]

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:
        if gpu.whole:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return pynvml.c_nvmlUtilization_t(gpu=gpu.utilisation, memory=5)

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return gpu.temperature

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:
        return gpu.milliwatts

    def nvmlDeviceGetClockInfo(self, gpu: Gpu, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_SM
        return gpu.clock_mhz

    def nvmlDeviceGetFanSpeed(self, gpu: Gpu) -> int:
        return gpu.fan_percent


def _process(pid: int, held: int | None) -> Any:
    """As pynvml's own functions give it: they put ``None`` for NVML's "not available"."""
    struct = pynvml.c_nvmlProcessInfo_v3_t(pid=pid, usedGpuMemory=held or 0)
    process = pynvml.nvmlStructToFriendlyObject(struct)
    process.usedGpuMemory = held
    return process


BY_UUID = "nvmlDeviceGetHandleByUUID"
FUNCTIONS = [name for name in vars(FakeNvml) if name.startswith("nvmlDevice") and name != "nvmlDeviceGetCount"]
