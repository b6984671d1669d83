"""NVML's readings of the device of this process: all that are in the table of readings."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

import psutil
import pynvml

from ..shared import gpus
from ..shared.messages import DeviceUse
from ..shared.readings import METRICS


class Nvml:
    """Reads one device; NVML stays open as long as the process lives.

    Args:
        uuid: what CUDA says of the device, see :func:`gpumem_nb.shared.gpus.find`.

    Attributes:
        note: one sentence on why the device cannot be read, or empty.
        driver: its version; empty where NVML does not tell.
    """

    def __init__(self, uuid: str) -> None:
        self.note = self.driver = ""
        self._unreadable = ""
        self._pid = os.getpid()
        try:
            pynvml.nvmlInit()
            with suppress(*gpus.ERRORS):
                self.driver = str(pynvml.nvmlSystemGetDriverVersion())
            self._device = gpus.find(uuid, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
            # Of a MIG instance NVML knows bytes and processes, the rest of its GPU only.
            self._gpu = gpus.whole(self._device)
            pynvml.nvmlDeviceGetMemoryInfo(self._device)
        except (*gpus.ERRORS, LookupError) as error:
            self._unreadable = _why(error)
            self.note = f"Device bytes are n/a: NVML cannot read this GPU ({self._unreadable})."

    def use(self, reserved: int) -> DeviceUse:
        """Return the device's readings now; takes milliseconds. ``reserved``: this process's bytes."""
        if self._unreadable:
            return DeviceUse(missing=dict.fromkeys(METRICS, self._unreadable))
        values: dict[str, float | None] = {}
        missing: dict[str, str] = {}
        processes = cache(partial(self._processes, reserved))  # one list for both shares
        shares: dict[str, Callable[[], int | None]] = {
            "own_bytes": lambda: processes()[self._pid],
            "other_bytes": lambda: self._others(processes()),
        }
        for name, metric in METRICS.items():
            try:
                values[name] = metric.read(self._device, self._gpu) if metric.read else shares[name]()
            except (*gpus.ERRORS, LookupError) as error:
                missing[name] = _why(error)
        return DeviceUse(missing, **values)

    def _processes(self, reserved: int) -> dict[int, int | None]:
        """Return all processes on the device, this one certainly among them."""
        listed = gpus.drawing(self._device) | gpus.computing(self._device)
        if self._pid not in listed:
            raise LookupError(
                f"NVML does not list this process, {self._pid}; inside a container it knows processes by other "
                "numbers, or not at all"
            )
        own = listed[self._pid]
        if own is None:
            raise LookupError("the driver does not tell how much each process holds")
        if own < reserved:
            raise LookupError(
                f"NVML's process {self._pid} holds less than this one, so it is another one of that number, outside "
                "this container"
            )
        return listed

    def _others(self, processes: dict[int, int | None]) -> int:
        if not gpus.sees_all_processes():
            raise LookupError("inside a container NVML may not list the processes outside it")
        total = 0
        for pid, held in processes.items():
            if pid == self._pid:
                continue
            if held is not None:
                total += held
            elif psutil.pid_exists(pid):  # one that ended since holds nothing any more
                raise LookupError(f"the driver does not tell how much process {pid} holds")
        return total


def _why(error: Exception) -> str:
    """In words why NVML does not tell something."""
    words = {
        pynvml.NVMLError_NotSupported: "this GPU does not report it",
        pynvml.NVMLError_NoPermission: "the driver does not permit it to this user",
        pynvml.NVMLError_GpuIsLost: "the GPU is lost: it no longer answers the driver",
        pynvml.NVMLError_LibraryNotFound: "there is no NVIDIA driver here",
    }
    return words.get(type(error), f"NVML says {error}" if isinstance(error, pynvml.NVMLError) else str(error))
