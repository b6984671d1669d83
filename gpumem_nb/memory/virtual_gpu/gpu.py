"""The virtual GPU: CPU tensors, accounted as if on a device with a memory limit, and replays of its model."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...internals.torch_internals import address
from ...shared.allocator_settings import DEFAULT, AllocatorSettings, in_force
from ...shared.errors import InvalidInput, SetupError
from ...shared.messages import Reading
from ...shared.units import format_bytes
from ..ledger.events import Base, Events
from ..tensors import storage_of
from .build import build

Ints = NDArray[np.int64]
DEFAULT_LIMIT_BYTES = 2 * 2**30  # per rank: room for the ready-made workloads, and near enough to run into


class _CReading(ctypes.Structure):
    """``GpumemReading`` of allocator.cpp."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("live", "live_peak", "reserved", "reserved_peak", "limit", "allocations", "over_limit", "foreign")
    ]
    live: int
    live_peak: int
    reserved: int
    reserved_peak: int
    limit: int
    allocations: int
    over_limit: int
    foreign: int


class CConfig(ctypes.Structure):
    """``gpumem::Config`` of caching_model.h."""

    _fields_ = (
        ("roundup_divisions", ctypes.c_uint64),
        ("max_split", ctypes.c_uint64),
        ("collect_above", ctypes.c_double),
        ("expandable", ctypes.c_bool),
    )

    @classmethod
    def of(cls, settings: AllocatorSettings) -> CConfig:
        """Return the same in the allocator's own units."""
        size_mb, threshold = settings.max_split_size_mb, settings.garbage_collection_threshold
        largest = 2**64 - 1 if size_mb is None else size_mb * 2**20
        return cls(settings.roundup_power2_divisions, largest, threshold or 0.0, settings.expandable_segments)


# ``GpumemEvent`` and ``GpumemCast`` of event_log.h.
_EVENT = np.dtype([("id", "u8"), ("bytes", "i8"), ("time_ns", "u8"), ("foreign", "u4"), ("call", "u4")])
_CAST = np.dtype([("parameter", "u8"), ("allocation", "u8")])
LONGEST_LOG = 4 << 20
"""Events after which the allocator logs no more, as in event_log.h."""


class AllocatorLog:
    """Events as the allocator itself sees them: every allocation of every thread, unless there are too many to log."""

    def __init__(self, library: ctypes.CDLL, allocator: AllocatorSettings) -> None:
        self.exact = True
        self._library = library
        self._allocator = allocator
        self._handle: int | None = None
        self._params: dict[int, int] = {}

    def begin(self, params: Sequence[Tensor]) -> Base:
        """Log from now on."""
        now = _CReading()
        self._params = {address(param): index for index, param in enumerate(params)}
        addresses = (ctypes.c_void_p * len(self._params))(*sorted(self._params))
        self._handle = self._library.gpumem_log_begin(addresses, len(addresses), ctypes.byref(now))
        numbers = ctypes.c_void_p()
        length = self._library.gpumem_log_layout(ctypes.byref(numbers))
        layout = _copied(numbers, length, np.dtype(np.int64)).reshape(-1, 3)
        return Base(now.live, now.foreign, layout, self._allocator)

    def watching(self) -> AbstractContextManager[object]:
        """Nothing to do: the allocator sees everything."""
        return nullcontext()

    def allocation(self, tensor: Tensor) -> int:
        """Return the number of the allocation in which a tensor lies; 0 for one that was not counted."""
        storage = storage_of(tensor)
        return 0 if storage is None else int(self._library.gpumem_allocation(address(storage)))

    def end(self) -> Events:
        """Return what happened since :meth:`begin`; nothing when it has been asked before."""
        if self._handle is None:
            return _events(np.empty(0, _EVENT), {}, 0)
        now, events, casts = _CReading(), ctypes.c_void_p(), ctypes.c_void_p()
        self._library.gpumem_read(ctypes.byref(now))
        lengths = ctypes.c_size_t(), ctypes.c_size_t()
        handle, self._handle = self._handle, None
        places = (ctypes.byref(value) for value in (events, lengths[0], casts, lengths[1]))
        self._library.gpumem_log_end(handle, *places)
        self.exact = lengths[0].value < LONGEST_LOG
        copies = _copied(casts, lengths[1].value, _CAST)
        of = {int(row["allocation"]): self._params[int(row["parameter"])] for row in copies}
        return _events(_copied(events, lengths[0].value, _EVENT), of, now.live_peak)


def pointer(numbers: Ints) -> Any:
    """As C takes them."""
    return numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))


def _copied(start: ctypes.c_void_p, length: int, kind: np.dtype[Any]) -> NDArray[Any]:
    raw = ctypes.string_at(start, length * kind.itemsize) if length else b""
    return np.frombuffer(raw, dtype=kind)


def _events(rows: NDArray[np.void], casts: dict[int, int], live_peak: int) -> Events:
    allocation, time_ns, call = (rows[name].astype(np.int64) for name in ("id", "time_ns", "call"))
    return Events(allocation, rows["bytes"], time_ns, rows["foreign"].astype(np.bool_), call, casts, live_peak)


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
        self._library = library()
        self.driver = ""
        self.allocator, self.note = in_force()
        self._library.gpumem_install(ctypes.byref(CConfig.of(self.allocator)))
        self._library.gpumem_enforce_on_this_thread(True)
        self.kind: Literal["virtual", "cuda"] = "virtual"
        self.torch_device = torch.device("cpu")
        limit = memory_limit or DEFAULT_LIMIT_BYTES
        self.name = f"virtual GPU {local_rank} ({format_bytes(limit)})"
        self.set_limit(limit)

    def reading(self) -> Reading:
        """Return the memory at this moment, in bytes."""
        now = self._read()
        return Reading(
            live_bytes=now.live,
            live_peak_bytes=now.live_peak,
            reserved_bytes=now.reserved,
            reserved_peak_bytes=now.reserved_peak,
            device_used_bytes=now.reserved,
            limit_bytes=now.limit or None,
        )

    def room(self) -> int | None:
        """Bytes that may still be reserved; ``None`` without a limit."""
        now = self._read()
        return now.limit - now.reserved if now.limit else None

    def releasable(self) -> int:
        """Bytes of cached segments that hold no tensor, which :meth:`empty_cache` would give back."""
        return int(self._library.gpumem_releasable())

    @property
    def allowed_bytes(self) -> int:
        """The limit; 0 without one."""
        return self._read().limit

    def use(self) -> None:
        """Do nothing: NVML has no device to read."""

    def reset_peak(self) -> None:
        """Let the peaks count from here."""
        self._library.gpumem_reset_peak()

    def set_limit(self, limit: int | None) -> None:
        """Move the limit, in bytes; ``None`` for none. Tensors that exist stay, but above the limit none is added."""
        self._library.gpumem_set_limit(limit or 0)

    def empty_cache(self) -> None:
        """Release reserved segments that hold no tensor, as ``torch.cuda.empty_cache`` does."""
        self._library.gpumem_empty_cache()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is counted here."""
        storage = storage_of(tensor) if tensor.device.type == "cpu" else None
        return storage is not None and self._library.gpumem_allocation(address(storage)) != 0

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Inside, passing the limit on this thread is counted, not raised; afterwards cached segments beyond it go."""
        before = self._library.gpumem_enforce_on_this_thread(False)
        try:
            yield
        finally:
            self._library.gpumem_enforce_on_this_thread(before)

    def communicates_on(self, threads: Collection[int]) -> None:
        """Count what these threads allocate, and only that, as communication."""
        self._library.gpumem_set_foreign_threads((ctypes.c_int32 * len(threads))(*sorted(threads)), len(threads))

    def event_log(self) -> AllocatorLog:
        """Its allocations and releases, one by one."""
        return AllocatorLog(self._library, self.allocator)

    def _read(self) -> _CReading:
        now = _CReading()
        self._library.gpumem_read(ctypes.byref(now))
        return now


def library() -> ctypes.CDLL:
    """Return the allocator's library, built if need be; loading it alone changes nothing in this process."""
    return _load(build())


@cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise SetupError(
            f"The virtual GPU's library {path} cannot be loaded ({error}): "
            "delete it and run python -m gpumem_nb.memory.virtual_gpu.build."
        ) from None
    library.gpumem_install.argtypes, library.gpumem_install.restype = [ctypes.POINTER(CConfig)], None
    library.gpumem_set_limit.argtypes, library.gpumem_set_limit.restype = [ctypes.c_uint64], None
    library.gpumem_enforce_on_this_thread.argtypes = [ctypes.c_bool]
    library.gpumem_enforce_on_this_thread.restype = ctypes.c_bool
    library.gpumem_set_foreign_threads.argtypes = [ctypes.POINTER(ctypes.c_int32), ctypes.c_size_t]
    library.gpumem_set_foreign_threads.restype = None
    library.gpumem_read.argtypes, library.gpumem_read.restype = [ctypes.POINTER(_CReading)], None
    library.gpumem_reset_peak.restype = None
    library.gpumem_log_begin.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(_CReading)]
    library.gpumem_log_begin.restype = ctypes.c_uint64
    address, count = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)
    library.gpumem_log_end.argtypes = [ctypes.c_uint64, address, count, address, count]
    library.gpumem_log_end.restype = None
    library.gpumem_allocation.argtypes, library.gpumem_allocation.restype = [ctypes.c_void_p], ctypes.c_uint64
    library.gpumem_empty_cache.restype = None
    library.gpumem_releasable.argtypes, library.gpumem_releasable.restype = [], ctypes.c_uint64
    events = ctypes.POINTER(ctypes.c_int64)
    config = ctypes.POINTER(CConfig)
    library.gpumem_log_layout.argtypes, library.gpumem_log_layout.restype = [address], ctypes.c_size_t
    length, limit = ctypes.c_size_t, ctypes.c_uint64
    library.gpumem_replay.argtypes = [events, length, events, length, limit, limit, config, ctypes.c_void_p]
    library.gpumem_replay.restype = ctypes.c_size_t
    return library


NOTHING_HELD = np.empty((0, 3), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The end and the peaks of a replay; ``live_bytes`` as asked for, not rounded.

    ``within_limit``: whether the limit would have allowed every allocation, perhaps with free segments given back.
    """

    live_bytes: int
    live_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    within_limit: bool


class _CReplayed(ctypes.Structure):
    """``GpumemReplayed`` of replay.cpp."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("live", "live_peak", "reserved", "reserved_peak", "over_limit")]
    live: int
    live_peak: int
    reserved: int
    reserved_peak: int
    over_limit: int


def replay(
    events: Sequence[int],
    limit_bytes: int | None = None,
    allocator: AllocatorSettings = DEFAULT,
    layout: Ints = NOTHING_HELD,
    allowed_bytes: int | None = None,
) -> Replayed:
    """Follow recorded events with an empty cache; tensors of this process are not touched.

    Args:
        events: what was allocated and released, and 0 where the cache was emptied.
        limit_bytes: of what may be reserved; ``None`` for no limit.
        allocator: how the caching allocator is set.
        layout: what it holds at the beginning, without free segments: a row for each block, in the order of
            addresses. Its bytes; the allocation in it, numbered from 1 as events count them, or 0 for a free one and -1
            for one without memory; its kind as a sum: 1 small, 2 expandable, 4 the first of a segment.
        allowed_bytes: of which ``garbage_collection_threshold`` is a share; 0 for never, ``None`` for the limit.

    Raises:
        InvalidInput: an event that releases what is not allocated.
        SetupError: the virtual GPU's library cannot be built.
    """
    out = _CReplayed()
    given, held = np.array(events, dtype=np.int64), np.ascontiguousarray(layout)
    config = CConfig.of(allocator)
    streams = (pointer(given), len(given), pointer(held), held.size)
    limits = (limit_bytes or 0, (limit_bytes or 0) if allowed_bytes is None else allowed_bytes)
    followed = library().gpumem_replay(*streams, *limits, ctypes.byref(config), ctypes.byref(out))
    if followed < len(events):
        raise InvalidInput(
            f"The trace cannot be followed: event {followed} is {events[followed]}, which releases nothing that is "
            "allocated. n > 0 allocates n bytes, -k releases the k-th allocation."
        )
    return Replayed(out.live, out.live_peak, out.reserved, out.reserved_peak, not out.over_limit)
