"""The GPUs of this host as NVML knows them: found by uuid, and which processes are on them.

NVML numbers all GPUs of the host and ignores CUDA_VISIBLE_DEVICES, and CUDA may number them in another order, so a
number says nothing: devices are matched by uuid. A GPU split by MIG counts as its instances.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pynvml

from .processes import HOSTS_OWN

ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
"""The exceptions of NVML's functions; the second if driver and nvidia-ml-py do not fit together."""


@contextmanager
def opened() -> Iterator[None]:
    """NVML is usable inside; raises one of :data:`ERRORS` without a driver."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def devices() -> Iterator[tuple[str, str, Any]]:
    """Name, uuid and handle of every GPU, or of its instances where MIG splits it; those that are lost are left out."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        with suppress(*ERRORS):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            if not is_split(gpu):
                yield f"GPU {index}", pynvml.nvmlDeviceGetUUID(gpu), gpu
                continue
            for number, instance in instances(gpu).items():
                yield f"GPU {index}, MIG instance {number}", pynvml.nvmlDeviceGetUUID(instance), instance


def find(uuid: str, visible: str) -> Any:
    """Return the handle of the device that CUDA uses.

    Args:
        uuid: what CUDA says of it, with or without ``GPU-``; of a MIG instance its own or its GPU's, as drivers differ.
        visible: CUDA_VISIBLE_DEVICES. CUDA uses one MIG instance a process, the first that is named.

    Raises:
        LookupError: which device it is cannot be told; says why.
        pynvml.NVMLError: NVML has no such device, or cannot reach it.
    """
    first = visible.split(",")[0].strip()
    if first.startswith("MIG-"):
        return _named(first)
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")
    if not is_split(device):
        return device
    parts = instances(device)
    if len(parts) != 1:  # the GPU's own bytes would be those of all instances together
        raise LookupError("it is split by MIG: name one of its instances in CUDA_VISIBLE_DEVICES")
    return next(iter(parts.values()))


def _named(beginning: str) -> Any:
    """Return the only MIG instance whose uuid begins so, as CUDA takes it."""
    found = [handle for _, uuid, handle in devices() if uuid.startswith(beginning)]
    if len(found) != 1:
        raise LookupError(f"{len(found) or 'no'} devices are called {beginning}… as CUDA_VISIBLE_DEVICES says")
    return found[0]


def may_be_visible(name: str, uuid: str) -> bool:
    """Return whether CUDA may use this one of :func:`devices`; numbers are reliable only in the order of the bus."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    wanted = [part.strip() for part in visible.split(",")]
    if not wanted[0].isdigit():
        return any(part and uuid.startswith(part) for part in wanted)
    in_bus_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return not in_bus_order or name.split(",")[0].removeprefix("GPU ") in wanted


def is_split(gpu: Any) -> bool:
    """Return whether MIG splits it."""
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(gpu)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return False  # a GPU or a driver without MIG
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def instances(gpu: Any) -> dict[int, Any]:
    """Return the MIG instances of a split GPU that this process may use, by number; numbers may have gaps."""
    found = {}
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with suppress(pynvml.NVMLError_NotFound):
            found[number] = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
    return found


def whole(device: Any) -> Any:
    """Return the GPU that a MIG instance is part of; any other device is whole itself."""
    try:
        return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return device


def computing(device: Any) -> dict[int, int | None]:
    """Return the processes that compute on a device, and the bytes each holds there; ``None`` where NVML does not tell.

    Drivers that give a container its own process numbers say 0 bytes for each (reported of 560); 0 means not reported.
    """
    return {each.pid: each.usedGpuMemory or None for each in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}


def drawing(device: Any) -> dict[int, int | None]:
    """Return the same for those that draw; GPUs for computing alone may not support the question."""
    with suppress(pynvml.NVMLError_NotSupported):
        return {each.pid: each.usedGpuMemory or None for each in pynvml.nvmlDeviceGetGraphicsRunningProcesses(device)}
    return {}


def sees_all_processes() -> bool:
    """Return whether process numbers here are the host's own; in a container only with --pid=host."""
    try:
        return os.readlink("/proc/self/ns/pid") == f"pid:[{HOSTS_OWN}]"
    except OSError:
        return False
