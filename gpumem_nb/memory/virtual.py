"""The virtual GPU: this process's CPU tensors, accounted as if on a device with a memory limit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from ..errors import SetupError
from ..sample import Reading
from .units import format_bytes
from .virtual_build import build

DEFAULT_LIMIT_BYTES = 2 * 2**30  # per rank: room for the ready-made workloads, and near enough to run into


class _CReading(ctypes.Structure):
    """``GpumemReading`` of virtual_allocator.cpp."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("live", "live_peak", "reserved", "reserved_peak", "limit", "allocations", "over_limit")
    ]
    live: int
    live_peak: int
    reserved: int
    reserved_peak: int
    limit: int
    allocations: int
    over_limit: int


class VirtualGPU:
    """Counts every CPU allocation of every thread from now on, and enforces the limit on the thread that made it.

    ``live`` is the bytes that were asked for; ``reserved`` is what the CUDA caching allocator would hold for them, and
    what the limit is compared with. A virtual GPU runs nothing else, so ``device_used`` is ``reserved``; the process's
    RSS is never shown. Not counted: tensors made before it, and those whose bytes torch's current CPU allocator did not
    hand out (from NumPy, from a data loader's worker, unpickled, or deep-copied other than as a parameter); their
    ``clone()`` is. There is one per process: a second object shows the same bytes.

    Raises:
        SetupError: the allocator cannot be built or loaded.
    """

    def __init__(self, local_rank: int, memory_limit: int | None = None) -> None:
        self._library = _load(build())
        self._library.gpumem_install()
        self._library.gpumem_enforce_on_this_thread(True)
        self.kind: Literal["virtual", "cuda"] = "virtual"
        self.torch_device = torch.device("cpu")
        self.note = ""
        limit = memory_limit or DEFAULT_LIMIT_BYTES
        self.name = f"virtual GPU {local_rank} ({format_bytes(limit)})"
        self.set_limit(limit)

    def reading(self) -> Reading:
        """The memory at this moment, in bytes."""
        now = self._read()
        return Reading(
            live=now.live,
            live_peak=now.live_peak,
            reserved=now.reserved,
            reserved_peak=now.reserved_peak,
            device_used=now.reserved,
            limit=now.limit or None,
        )

    @property
    def over_limit(self) -> int:
        """How many allocations passed the limit where it is not enforced: on other threads, and in ``exempt()``."""
        return self._read().over_limit

    @property
    def allocations(self) -> int:
        """How many allocations there have been."""
        return self._read().allocations

    def reset_peak(self) -> None:
        """Let the peaks count from here."""
        self._library.gpumem_reset_peak()

    def set_limit(self, limit: int | None) -> None:
        """Move the limit, in bytes; ``None`` for none. What is held already stays, even beyond it."""
        self._library.gpumem_set_limit(limit or 0)

    def empty_cache(self) -> None:
        """Release reserved segments that hold no tensor, as ``torch.cuda.empty_cache`` does."""
        self._library.gpumem_empty_cache()

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Inside, on this thread, passing the limit is counted and not raised."""
        before = self._library.gpumem_enforce_on_this_thread(False)
        try:
            yield
        finally:
            self._library.gpumem_enforce_on_this_thread(before)

    def step_scope(self) -> AbstractContextManager[None]:
        """Nothing to do: the allocator sees every step."""
        return nullcontext()

    def _read(self) -> _CReading:
        now = _CReading()
        self._library.gpumem_read(ctypes.byref(now))
        return now


@cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise SetupError(
            f"The virtual GPU's library {path} cannot be loaded ({error}): "
            "delete it and run python -m gpumem_nb.memory.virtual_build."
        ) from None
    library.gpumem_install.restype = None
    library.gpumem_set_limit.argtypes, library.gpumem_set_limit.restype = [ctypes.c_uint64], None
    library.gpumem_enforce_on_this_thread.argtypes = [ctypes.c_bool]
    library.gpumem_enforce_on_this_thread.restype = ctypes.c_bool
    library.gpumem_read.argtypes, library.gpumem_read.restype = [ctypes.POINTER(_CReading)], None
    library.gpumem_reset_peak.restype = None
    library.gpumem_empty_cache.restype = None
    return library
