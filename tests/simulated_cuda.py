"""A GPU that refuses memory where a real one would, on a machine without any: the toolkit's own code for CUDA on top.

:class:`gpumem_nb.memory.cuda.CudaDevice` runs as it is; the functions of torch.cuda that it asks are answered by the
virtual GPU's allocator, which is a model of CUDA's. So what is tested is what differs from the virtual GPU: there is no
room beyond the device's own, whatever a rescue needs; the limit is a share of it; other processes and libraries take
their part past torch's allocator; steps are recorded by their tensors. Tensors are the CPU's, so no kernel, no stream
and no second of time is a GPU's.
"""

from __future__ import annotations

import gc
from optparse import Values
from types import SimpleNamespace
from typing import Any

import torch

from gpumem_nb.internals.torch_internals import address
from gpumem_nb.memory import cuda
from gpumem_nb.memory.cuda import CudaDevice
from gpumem_nb.memory.tensors import storage_of, tensors_of_this_process
from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU

MIB = 2**20


class Driver:
    """Functions of ``torch.cuda``, of a GPU with so many bytes.

    Attributes:
        gpu: whose allocator answers.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._state = Values({"share": 1.0, "taken": 0})  # of a class whose objects an undone step leaves alone
        self.gpu = VirtualGPU(0, total)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)  # the others as they are

    @property
    def taken(self) -> int:
        """Bytes past torch's allocator, of libraries and other processes."""
        return int(self._state.taken)

    def take(self, size: int, library: str = "CUBLAS") -> None:
        """Ask for memory as a library does, past torch's allocator.

        Raises:
            RuntimeError: there is none.
        """
        if size > self.mem_get_info()[0]:
            raise RuntimeError(
                f"CUDA error: {library}_STATUS_ALLOC_FAILED when calling `{library.lower()}Create(handle)`"
            )
        self._state.taken += size
        self._limit()

    def give(self, size: int) -> None:
        """Give it back."""
        self._state.taken -= size
        self._limit()

    def is_available(self) -> bool:
        """Say that there is a GPU."""
        return True

    def device_count(self) -> int:
        """Say that there is one."""
        return 1

    def set_device(self, device: object) -> None:
        """Do nothing: there is one."""

    def init(self) -> None:
        """Do nothing."""

    def get_device_properties(self, device: object) -> SimpleNamespace:
        """Return what is asked for of them."""
        return SimpleNamespace(name="simulated GPU", total_memory=self._total, uuid="simulated")

    def memory_stats_as_nested_dict(self, device: object) -> dict[str, Any]:
        """Return as much as is asked for of the allocator's statistics."""
        now = self.gpu.reading()
        assert now.live_peak_bytes is not None
        assert now.reserved_bytes is not None

        def stat(current: int, peak: int | None) -> dict[str, dict[str, int | None]]:
            return {"all": {"current": current, "peak": peak, "allocated": 1, "freed": 0}}

        split = now.reserved_bytes - now.live_bytes - self.gpu.releasable()
        return {
            "requested_bytes": stat(now.live_bytes, now.live_peak_bytes),
            "allocated_bytes": stat(now.live_bytes, now.live_peak_bytes),
            "active_bytes": stat(now.live_bytes, now.live_peak_bytes),
            "reserved_bytes": stat(now.reserved_bytes, now.reserved_peak_bytes),
            "inactive_split_bytes": stat(split, split),
        }

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """Return the segments as torch does, as far as that is asked for; blocks of no tensor ask for what is left."""
        log = self.gpu.event_log()
        layout = log.begin([]).layout
        log.end()
        frozen = gc.get_freeze_count() > 0  # as within a trial; frozen objects are not among those that there are
        gc.unfreeze()
        storages = [storage for tensor in tensors_of_this_process() if (storage := storage_of(tensor)) is not None]
        if frozen:
            gc.freeze()
        held = {self.gpu._library.gpumem_allocation(address(storage)): storage for storage in storages}
        segments: list[dict[str, Any]] = []
        left = self.gpu.reading().live_bytes
        for place, (size, serves, kind) in enumerate(layout.tolist()):
            if kind & 4:
                kinds = {"segment_type": "small" if kind & 1 else "large", "stream": 0, "segment_pool_id": (0, 0)}
                segments.append({"device": 0, "address": -place, "blocks": [], **kinds})
            block: dict[str, Any] = {"size": size, "address": -place, "state": "inactive", "requested_size": 0}
            if serves:
                storage = held.get(serves)
                asked_for = min(size, left) if storage is None else storage.nbytes()
                at = -place if storage is None else storage.data_ptr()
                block |= {"state": "active_allocated", "requested_size": asked_for, "address": at}
                left -= asked_for
            segments[-1]["blocks"].append(block)
        unknown = [one for segment in segments for one in segment["blocks"] if one["requested_size"] == one["size"]]
        if left and unknown:
            unknown[-1]["requested_size"] += left
        return list(reversed(segments))

    def current_stream(self, device: object) -> SimpleNamespace:
        """Return the default one."""
        return SimpleNamespace(cuda_stream=0)

    def memory_reserved(self, device: object) -> int:
        """Return what the allocator holds."""
        return self.gpu.reading().reserved_bytes or 0

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Return what is free on the device, and what it has."""
        return max(0, self._total - self.taken - self.memory_reserved(device)), self._total

    def set_per_process_memory_fraction(self, share: float, device: object) -> None:
        """Let the process have so much of the device, as far as it is there."""
        self._state.share = share
        self._limit()

    def reset_peak_memory_stats(self, device: object) -> None:
        """Let the peaks count from here."""
        self.gpu.reset_peak()

    def empty_cache(self) -> None:
        """Give cached segments back."""
        self.gpu.empty_cache()

    def _limit(self) -> None:
        self.gpu.set_limit(min(int(self._state.share * self._total), self._total - self.taken))


class SimulatedCuda(CudaDevice):
    """The toolkit's device on such a GPU.

    Attributes:
        driver_of_device: the GPU.
    """

    def __init__(self, total: int, memory_limit: int | None = None) -> None:
        self.driver_of_device = Driver(total)
        vars(cuda)["torch"] = _With(cuda=self.driver_of_device)
        super().__init__(0, memory_limit)
        self.torch_device = torch.device("cpu")


class _With(SimpleNamespace):
    """The module torch with another ``cuda``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def put_in(total: int, limit: int | None = None) -> SimulatedCuda:
    """Let this rank be on such a GPU from the next load on; :func:`take_out` undoes it."""
    from gpumem_nb.engine import rank
    from gpumem_nb.memory import device

    if not isinstance(rank._device, SimulatedCuda):
        _before.append((rank._device, rank._device.reading().limit_bytes))
    new = rank._device = device._opened = SimulatedCuda(total, limit)
    return new


_before: list[Any] = []


def take_out() -> None:
    """Let this rank be on its virtual GPU again, from the next load on."""
    from gpumem_nb.engine import rank
    from gpumem_nb.memory import device

    while _before:
        old, limit = _before.pop()
        rank._device = device._opened = old
        vars(cuda)["torch"] = torch
        old.set_limit(limit)
