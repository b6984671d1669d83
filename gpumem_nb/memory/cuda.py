"""A real GPU: torch's allocator statistics, torch's memory fraction as limit, NVML for the whole device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from ..errors import InvalidInput, SetupError
from ..sample import Reading
from .events import TensorLog
from .units import format_bytes


class CudaDevice:
    """The GPU with index ``local_rank`` among the visible ones; ranks beyond the last GPU share them in turn.

    ``live`` is ``memory_allocated``, ``reserved`` is ``memory_reserved``, ``device_used`` what NVML says all processes
    hold on it. Without a limit of its own, ``limit`` is the size of the GPU.

    Raises:
        SetupError: torch sees no GPU.
        InvalidInput: a limit larger than the GPU.
    """

    def __init__(self, local_rank: int, memory_limit: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise SetupError("torch sees no GPU here: use --device cpu, or install a CUDA build of torch and a driver.")
        self.kind: Literal["virtual", "cuda"] = "cuda"
        self.torch_device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(self.torch_device)
        torch.cuda.init()
        properties = torch.cuda.get_device_properties(self.torch_device)
        self.name: str = properties.name
        self._total: int = properties.total_memory
        self._limit = self._total
        self._device_used, self.note = nvml_reader(str(properties.uuid))
        if memory_limit is not None:
            self.set_limit(memory_limit)

    def reading(self) -> Reading:
        """The memory at this moment, in bytes."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        live, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Reading(
            live=live["current"],
            live_peak=live["peak"],
            reserved=reserved["current"],
            reserved_peak=reserved["peak"],
            device_used=self._device_used(),
            limit=self._limit,
        )

    def reset_peak(self) -> None:
        """Let the peaks count from here."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def set_limit(self, limit: int | None) -> None:
        """Move the limit of this process, in bytes of reserved memory; ``None`` for the whole GPU."""
        if limit is not None and limit > self._total:
            raise InvalidInput(
                f"A memory limit of {format_bytes(limit)} is more than {self.name} has: "
                f"at most {format_bytes(self._total)} is allowed."
            )
        self._limit = limit or self._total
        self._allow(self._limit)

    def empty_cache(self) -> None:
        """Give cached segments that hold no tensor back to the device."""
        torch.cuda.empty_cache()

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Inside, this process may use the whole GPU."""
        self._allow(self._total)
        try:
            yield
        finally:
            self._allow(self._limit)

    def step_scope(self) -> AbstractContextManager[None]:
        """Nothing to do: torch's allocator sees every step."""
        return nullcontext()

    def event_log(self) -> TensorLog:
        """The tensors that come and go; memory inside operators is not seen."""
        return TensorLog("cuda", lambda: self.reading().live)

    def _allow(self, limit: int) -> None:
        torch.cuda.set_per_process_memory_fraction(limit / self._total, self.torch_device)


def nvml_reader(uuid: str) -> tuple[Callable[[], int | None], str]:
    """A function that reads the used bytes of the device with this CUDA uuid, and why it reads nothing, if so.

    NVML numbers all GPUs of the host and ignores CUDA_VISIBLE_DEVICES, so the device is found by its uuid.
    """
    try:
        import pynvml
    except ImportError:
        return _unknown, "Device bytes are n/a: nvidia-ml-py is not installed (pip install nvidia-ml-py)."
    try:
        pynvml.nvmlInit()
        handle = _nvml_handle(pynvml, uuid)
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except (pynvml.NVMLError, LookupError) as error:
        return _unknown, f"Device bytes are n/a: NVML cannot read this GPU ({error})."

    def used() -> int | None:
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except pynvml.NVMLError:
            return None

    return used, ""


def _nvml_handle(nvml: Any, uuid: str) -> Any:
    """The handle of a MIG instance where one is in use, else of the GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith("MIG-"):  # CUDA uses one MIG instance per process: the first that is named
        return nvml.nvmlDeviceGetHandleByUUID(visible.split(",")[0].strip())
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")
    if _is_split(nvml, handle):  # its bytes would be those of all instances together
        raise LookupError("it is split by MIG: name one of its instances in CUDA_VISIBLE_DEVICES")
    return handle


def _is_split(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # a GPU without MIG
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _unknown() -> int | None:
    return None
