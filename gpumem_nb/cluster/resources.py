"""What this machine offers to ranks: cores, memory, GPUs."""

from __future__ import annotations

import contextlib
import os

import psutil

from ..errors import InvalidInput, StartError

# An idle rank (Python, torch, Horovod) holds about 330 MB of resident memory (measured, torch 2.13 CPU build).
RANK_RESIDENT_BYTES = 330 * 10**6
DEFAULT_RANKS_WITHOUT_GPU = 2


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus() -> int:
    """GPUs that ranks will see, counted through NVML so that the kernel never touches CUDA; 0 without a driver."""
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    return 0


def gpus_in_use() -> list[str]:
    """Which GPUs of this machine other processes compute on, in words; those of this kernel's ranks left out."""
    import pynvml

    own = {child.pid for child in psutil.Process().children(recursive=True)}
    found = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                users = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index))
                if pids := sorted(user.pid for user in users if user.pid not in own):
                    found.append(f"GPU {index} is in use by process {', '.join(map(str, pids))}")
        finally:
            pynvml.nvmlShutdown()
    return found


def most_ranks() -> int:
    """How many ranks this machine can hold: bounded by memory, and by eight ranks a core."""
    by_memory = psutil.virtual_memory().available // RANK_RESIDENT_BYTES
    return max(1, min(int(by_memory), 8 * cores()))


def choose(n: int | None, device: str) -> tuple[int, str]:
    """The number of ranks and their kind of device (``cuda`` or ``cpu``), checked against the machine."""
    if device not in ("auto", "cuda", "cpu"):
        raise InvalidInput(f"device={device!r} is not known. Allowed: auto, cuda, cpu.")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise InvalidInput(f"{n!r} ranks cannot be started: it must be a whole number of at least 1, such as 4.")
    gpus = visible_gpus() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise StartError("There is no GPU that this notebook can see. Use --device cpu for virtual GPUs on the CPU.")
    kind = "cuda" if gpus else "cpu"
    if n is None:
        n = gpus or DEFAULT_RANKS_WITHOUT_GPU
    if n > most_ranks():
        memory = psutil.virtual_memory().available / 2**30
        raise InvalidInput(
            f"{n} ranks do not fit on this machine: with {cores()} cores and {memory:.0f} GiB of free memory at most "
            f"{most_ranks()} make sense. Try %hvd_start {min(4, most_ranks())}."
        )
    return n, kind
