"""Host memory in which a rank puts aside what its GPU needs later; counted by itself, never as the device's."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from ..shared.errors import WorkloadError
from ..shared.processes import available_bytes
from ..shared.units import format_bytes

_SPARE = 0.8  # of what the machine has free; the rest is for its other programs


class _Lent(weakref.ref[Any]):
    """A buffer that is in use as long as what this refers to lives; ``None`` for one that ends with that."""

    __slots__ = ("address", "buffer", "key")

    address: int
    buffer: Any
    key: tuple[str, int]


class HostUse(NamedTuple):
    """Bytes of host memory: the most in use since the last step began, what a rank may use, and what is held."""

    host_bytes: int = 0
    host_limit_bytes: int = 0
    host_state_bytes: int = 0


class HostMemory:
    """The host memory of one rank, for all that waits there: one pool, as long as something of the rank uses it.

    Args:
        ranks: how many share the memory of this machine.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._pool: weakref.ref[HostPool] | None = None

    @property
    def in_use(self) -> HostPool | None:
        """Return the pool, if something uses it."""
        return self._pool() if self._pool else None

    @property
    def use(self) -> HostUse:
        """Return what waits there."""
        pool = self.in_use
        return HostUse(pool.peak_bytes, pool.limit_bytes, pool.held_bytes) if pool else HostUse()

    def pool(self) -> HostPool:
        """Return the pool to use; a new one may take what the machine has free now."""
        pool = self.in_use or HostPool(self._ranks)
        self._pool = weakref.ref(pool)
        return pool


class HostPool:
    """Buffers of host memory that are used again from step to step; pinned for a real GPU.

    For a virtual GPU they are NumPy's: torch's allocator, by whose bytes a virtual GPU is counted, never sees them.

    What a buffer is lent to lets go of it by its end, in the middle of backward or on another thread. An interrupt that
    came to Python code there would be lost, so what is called then is C code that only notes it.

    Args:
        ranks: how many share what the machine has free now.

    Attributes:
        peak_bytes: the most in use since the last step began.
        taken_peak_bytes: the same of what :meth:`take` gave alone.
        limit_bytes: what this rank may use; the buffers that wait to be used again are part of it.
    """

    def __init__(self, ranks: int) -> None:
        self.limit_bytes = int(_SPARE * available_bytes() / ranks)
        self.peak_bytes = self.taken_peak_bytes = 0
        self._lent: dict[_Lent, int] = {}  # and their bytes
        self._ended = deque[_Lent]()  # which came back, and were not put among the free ones yet
        self._free = defaultdict[tuple[str, int], list[Any]](list)
        self._asked = set[tuple[str, int]]()
        self._held = dict[int, _Lent]()  # what is not lent again, by its address
        # Bytes of what was taken, and of what is held; unknown while that changes, and where an interrupt came then.
        self._sums: tuple[int, int] | None = 0, 0

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the buffers in use now."""
        return sum(self._in_use())

    @property
    def held_bytes(self) -> int:
        """Return the bytes of those that :meth:`hold` gave."""
        return self._in_use()[1]

    def _in_use(self) -> tuple[int, int]:
        """Return the bytes of what was taken, and of what is held."""
        self._take_back()
        if self._sums is None:
            held = sum(nbytes for lent, nbytes in self._lent.items() if lent.address)
            self._sums = sum(self._lent.values()) - held, held
        return self._sums

    def _take_back(self) -> None:
        while self._ended:
            lent, sums = self._ended[0], self._sums
            self._sums = None
            known = self._lent.pop(lent, 0)  # 0 where an interrupt came in between
            if known and lent.buffer is not None:
                self._free[lent.key].append(lent.buffer)
            if self._held.get(lent.address) is lent:
                del self._held[lent.address]
            self._ended.popleft()
            self._sums = _moved(sums, -known, lent)

    @property
    def _free_bytes(self) -> int:
        return sum(nbytes * len(kept) for (_, nbytes), kept in self._free.items())

    def begin(self) -> None:
        """A step begins: buffers of sizes that the last one had no use for are given back to the system."""
        self.peak_bytes, self.taken_peak_bytes = self.used_bytes, self._in_use()[0]
        for key in set(self._free) - self._asked:
            del self._free[key]
        self._asked = set()

    def take(self, nbytes: int, device: torch.device, user: Any) -> Any:
        """Return a buffer: an array of bytes, or a pinned tensor of them for a real GPU; ``user`` has it until its end.

        Raises:
            WorkloadError: it would be more than the limit.
        """
        used = self._checked(nbytes, "for backward", "offload_activations=off, or a smaller batch_size")
        self.taken_peak_bytes = max(self.taken_peak_bytes, used - self.held_bytes)
        key = device.type, nbytes
        self._asked.add(key)
        if not (kept := self._free[key]) and used + self._free_bytes > self.limit_bytes:
            self._free.clear()
        buffer = kept.pop() if kept else _new(nbytes, device)
        self._lend(user, buffer, key, 0)
        return buffer

    def hold(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return a tensor of bytes, whose memory goes back to the system with the last tensor that lies in it.

        Raises:
            WorkloadError: it would be more than the limit.
        """
        if self._checked(nbytes, "between updates", "offload_optimizer=off") + self._free_bytes > self.limit_bytes:
            self._free.clear()
        memory = _new(nbytes, device)
        flat = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)
        self._lend(flat.untyped_storage(), None, (device.type, nbytes), flat.data_ptr())
        return flat

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in memory that :meth:`hold` gave."""
        self._take_back()
        return bool(self._held) and tensor.data_ptr() in self._held

    def _checked(self, nbytes: int, when: str, instead: str) -> int:
        used = self.used_bytes + nbytes
        if used > self.limit_bytes:
            raise WorkloadError(
                f"Host memory is short: {format_bytes(used)} were to wait there {when}, and "
                f"this rank may use {format_bytes(self.limit_bytes)}, its part of what the machine had free. Use "
                f"{instead}."
            )
        self.peak_bytes = max(self.peak_bytes, used)
        return used

    def _lend(self, user: Any, buffer: Any, key: tuple[str, int], address: int) -> None:
        lent = _Lent(user, self._ended.append)
        lent.buffer, lent.key, lent.address = buffer, key, address
        sums, self._sums = self._sums, None
        self._lent[lent] = key[1]
        if address:
            self._held[address] = lent
        self._sums = _moved(sums, key[1], lent)


def _moved(sums: tuple[int, int] | None, nbytes: int, lent: _Lent) -> tuple[int, int] | None:
    if sums is None:
        return None
    taken, held = sums
    return (taken, held + nbytes) if lent.address else (taken + nbytes, held)


def _new(nbytes: int, device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return np.empty(nbytes, dtype=np.uint8)


def copy_out(flat: torch.Tensor, buffer: Any) -> None:
    """Copy the bytes of a device into a buffer, in which those of a GPU have arrived after :func:`settle`.

    One stream copies in both directions, so a buffer is not read before it is written, nor the other way round.
    """
    if flat.device.type == "cuda":
        stream = _stream(flat.device)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            buffer.copy_(flat, non_blocking=True)
        flat.record_stream(stream)
    else:
        np.copyto(np.asarray(buffer), flat.numpy())


def copy_in(buffer: Any, flat: torch.Tensor) -> Any:
    """Fill what lies on a device with a buffer's bytes; for a real GPU return the event after which it is filled."""
    if flat.device.type != "cuda":
        np.copyto(flat.numpy(), np.asarray(buffer))
        return None
    stream = _stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))  # where the memory may have been in use until now
    with torch.cuda.stream(stream):
        flat.copy_(buffer, non_blocking=True)
        copied = stream.record_event()
    flat.record_stream(stream)
    return copied


def settle(device: torch.device) -> None:
    """Wait until all that was copied to or from host memory has arrived."""
    if device.type == "cuda":
        _stream(device).synchronize()


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
