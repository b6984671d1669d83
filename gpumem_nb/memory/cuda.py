"""A real GPU: torch's allocator statistics, torch's memory fraction as limit, NVML's readings for the whole device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import pynvml
import torch

from ..internals import torch_internals
from ..shared import gpus
from ..shared.allocator_settings import in_force
from ..shared.errors import InvalidInput, SetupError
from ..shared.messages import DeviceUse, Reading
from ..shared.readings import METRICS
from ..shared.state_file import why_kept
from ..shared.units import format_bytes
from .ledger.events import Lying, TensorLog, new_number
from .tensors import storage_of
from .virtual_gpu.build import build


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


_PICKLE = b"\x80"  # how a snapshot begins
MOST_ENTRIES = 100_000  # a step of a large model has some ten thousand; each takes up to several KB of host memory


class CudaDevice:
    """The GPU with index ``local_rank`` among the visible ones; ranks beyond the last GPU share them in turn.

    ``live`` is what tensors asked for (``memory_allocated`` counts whole blocks, up to 1 MiB more for a large tensor),
    ``reserved`` is ``memory_reserved``, ``device_used`` what NVML said at the latest :meth:`use` that all processes
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
        self._is_told = False  # its limit
        self._exempt = 0  # how often exempt() was entered
        self._nvml = Nvml(str(properties.uuid))
        self.driver = self._nvml.driver
        self.allocator, not_modelled = in_force()
        self.note = " ".join(filter(None, (self._nvml.note, not_modelled)))
        self._device_used = self.use().used_bytes
        threading.Thread(target=_build_ahead, name="gpumem_nb building", daemon=True).start()
        if memory_limit is not None:
            self.set_limit(memory_limit)

    def reading(self) -> Reading:
        """Return the memory at this moment, in bytes."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        live, reserved = _asked_for(stats), stats["reserved_bytes"]["all"]
        return Reading(
            live_bytes=live["current"],
            live_peak_bytes=live["peak"],
            reserved_bytes=reserved["current"],
            reserved_peak_bytes=reserved["peak"],
            device_used_bytes=self._device_used,
            limit_bytes=self._limit,
        )

    def use(self) -> DeviceUse:
        """Return what NVML says of the whole device at this moment; takes milliseconds."""
        use = self._nvml.use(torch.cuda.memory_reserved(self.torch_device))
        self._device_used = use.used_bytes
        return use

    def room(self) -> int:
        """Bytes that may still be reserved: within the limit, and not taken by other processes on this GPU."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return min(self._limit - torch.cuda.memory_reserved(self.torch_device), free)

    def releasable(self) -> int:
        """Bytes of cached segments that hold no tensor; parts of segments in use are not among them."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        names = ("reserved_bytes", "active_bytes", "inactive_split_bytes")
        reserved, active, split = (int(stats[name]["all"]["current"]) for name in names)
        return max(0, reserved - active - split)

    @property
    def allowed_bytes(self) -> int:
        """The limit of which torch takes a share; 0 where it has none (``set_fraction``, CUDACachingAllocator.cpp)."""
        return self._limit if self._is_told else 0

    def reset_peak(self) -> None:
        """Let the peaks count from here."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def set_limit(self, limit: int | None) -> None:
        """Move the limit of this process, in bytes of reserved memory; ``None`` for the whole GPU.

        Raises:
            InvalidInput: more than the GPU has.
        """
        if limit is not None and limit > self._total:
            raise InvalidInput(
                f"A memory limit of {format_bytes(limit)} is more than {self.name} has: "
                f"at most {format_bytes(self._total)} is allowed."
            )
        self._limit = limit or self._total
        if not self._exempt:
            self._allow(self._limit)

    def empty_cache(self) -> None:
        """Give cached segments that hold no tensor back to the device."""
        torch.cuda.empty_cache()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this GPU."""
        return tensor.device == self.torch_device and storage_of(tensor) is not None

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Inside, this process may use the whole GPU; cached segments beyond its limit go afterwards."""
        self._exempt += 1
        if self._exempt == 1:
            self._allow(self._total)
        try:
            yield
        finally:
            self._exempt -= 1
            if self._exempt == 0:
                self._allow(self._limit)
                if torch.cuda.memory_reserved(self.torch_device) > self._limit:
                    self.empty_cache()

    def communicates_on(self, threads: Collection[int]) -> None:
        """Nothing to do: torch's allocator does not tell who asks."""

    def event_log(self) -> TensorLog:
        """Return the tensors that come and go; memory inside operators is not seen."""
        return TensorLog(self.torch_device, self._requested, self.allocator, self._lying)

    def _requested(self) -> tuple[int, int]:
        """Live bytes and their peak before the allocator rounds them up, which a large tensor's can be by 1 MiB."""
        requested = _asked_for(torch.cuda.memory_stats_as_nested_dict(self.torch_device))
        return requested["current"], requested["peak"]

    def _lying(self) -> Lying | None:
        """Return where everything lies now; ``None`` where torch does not say it as it is understood here."""
        with suppress(LookupError, TypeError, RuntimeError):  # torch calls what a snapshot holds internal
            stream = torch.cuda.current_stream(self.torch_device).cuda_stream
            place = self.torch_device.index or 0, stream
            return lying_in(torch.cuda.memory_snapshot(), *place, self._requested()[0])
        return None

    def _allow(self, limit: int) -> None:
        # torch rounds the product down: half a byte more keeps it from ending one byte, and so one segment, short.
        self._is_told = True
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit + 0.5) / self._total), self.torch_device)


_STATES = {"active_allocated": True, "active_pending_free": True, "inactive": False}  # of blocks: whether in use
_SMALL, _BEGINS = 1, 4  # of a layout: kSmall and kBegins of virtual_gpu/caching_model.h


def lying_in(segments: Iterable[Mapping[str, Any]], index: int, stream: int, requested: int) -> Lying | None:
    """Return where everything lies on a GPU, from torch's snapshot of its allocator.

    What is free in segments of other streams, or of pools of their own, counts as in use: the tensors of a step on this
    ``stream`` cannot come to lie there. ``None`` for segments that expand, which are modelled otherwise, and
    where tensors did not ask for as many bytes in all as torch counts, ``requested``.
    """
    rows, numbers, asked_for = list[tuple[int, int, int]](), dict[int, int](), 0
    for segment in sorted((one for one in segments if one["device"] == index), key=lambda one: one["address"]):
        if segment.get("is_expandable"):
            return None
        usual = segment["stream"] == stream and not any(segment.get("segment_pool_id", ()))
        kind, address = (_SMALL if segment["segment_type"] == "small" else 0) | _BEGINS, segment["address"]
        for block in segment["blocks"]:
            in_use = _STATES[block["state"]]
            number = new_number() if in_use or not usual else 0
            if in_use:
                numbers[block.get("address", address)] = number
                asked_for += block["requested_size"]
            rows.append((block["size"], number, kind))
            kind, address = kind & ~_BEGINS, address + block["size"]
    if asked_for != requested:
        return None
    return Lying(np.array(rows, dtype=np.int64).reshape(-1, 3), numbers)


def _asked_for(stats: Mapping[str, Any]) -> Mapping[str, int]:
    """Return what tensors asked for; that of blocks where the allocator counts no such thing, as cudaMallocAsync."""
    counted: Mapping[str, int] = stats["requested_bytes"]["all"]
    return counted if counted["allocated"] else stats["allocated_bytes"]["all"]


def _build_ahead() -> None:
    """Compile the model of the caching allocator, once for each torch: the first prediction would wait 6 s for it."""
    with suppress(SetupError):  # which the first prediction says
        build()


def record_allocations(enabled: bool) -> None:
    """Let torch's allocator keep or forget a history of allocations and releases, with their Python stacks."""
    torch_internals.record_allocations(enabled, MOST_ENTRIES)


def write_snapshot(path: str) -> None:
    """Write torch's own snapshot of its allocator, history included, for its visualiser (pytorch.org/memory_viz).

    Raises:
        InvalidInput: the file cannot be written, or something else has that name.
    """
    try:
        if kept := why_kept(Path(path), _PICKLE, "a snapshot of memory"):
            raise InvalidInput(kept)
        torch_internals.dump_allocations(path)
    except OSError as error:
        raise InvalidInput(
            f"The snapshot cannot be written to {path}: {error.strerror}. Name a file such as step.pickle in a folder "
            "that you may write to."
        ) from None
