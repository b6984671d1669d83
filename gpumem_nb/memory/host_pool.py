"""Host memory in which a rank puts aside what its GPU needs later; counted by itself, never as the device's."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch

from ..shared.errors import WorkloadError
from ..shared.processes import available_bytes
from ..shared.units import format_bytes

_SPARE = 0.8  # of what the machine has free; the rest is for its other programs


class _Lent(weakref.ref[Any]):
    """A buffer that is in use as long as what this refers to lives."""

    __slots__ = ("buffer", "key")

    buffer: Any
    key: tuple[str, int]


class HostPool:
    """Buffers of host memory that are used again from step to step; pinned for a real GPU.

    For a virtual GPU they are NumPy's: torch's allocator, by whose bytes a virtual GPU is counted, never sees them.

    What a buffer is lent to lets go of it by its end, in the middle of backward or on another thread. An interrupt that
    came to Python code there would be lost, so what is called then is C code that only notes it.

    Args:
        ranks: how many share what the machine has free now.

    Attributes:
        peak_bytes: the most in use since the last step began.
        limit_bytes: what this rank may use; the buffers that wait to be used again are part of it.
    """

    def __init__(self, ranks: int) -> None:
        self.limit_bytes = int(_SPARE * available_bytes() / ranks)
        self.peak_bytes = 0
        self._lent: dict[_Lent, int] = {}  # and their bytes
        self._ended = deque[_Lent]()  # which came back, and were not put among the free ones yet
        self._free = defaultdict[tuple[str, int], list[Any]](list)
        self._asked = set[tuple[str, int]]()

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the buffers in use now."""
        while self._ended:
            lent = self._ended[0]
            if self._lent.pop(lent, None) is not None:  # it is, where an interrupt came in between
                self._free[lent.key].append(lent.buffer)
            self._ended.popleft()
        return sum(self._lent.values())

    @property
    def _free_bytes(self) -> int:
        return sum(nbytes * len(kept) for (_, nbytes), kept in self._free.items())

    def begin(self) -> None:
        """A step begins: buffers of sizes that the last one had no use for are given back to the system."""
        self.peak_bytes = self.used_bytes
        for key in set(self._free) - self._asked:
            del self._free[key]
        self._asked = set()

    def take(self, nbytes: int, device: torch.device, user: Any) -> Any:
        """Return a buffer: an array of bytes, or a pinned tensor of them for a real GPU; ``user`` has it until its end.

        Raises:
            WorkloadError: it would be more than the limit.
        """
        used = self.used_bytes + nbytes
        if used > self.limit_bytes:
            raise WorkloadError(
                f"Host memory is short: {format_bytes(used)} were to wait there for backward, and "
                f"this rank may use {format_bytes(self.limit_bytes)}, its part of what the machine had free. Use "
                "offload_activations=off, or a smaller batch_size."
            )
        key = device.type, nbytes
        self._asked.add(key)
        if not (kept := self._free[key]) and used + self._free_bytes > self.limit_bytes:
            self._free.clear()
        buffer = kept.pop() if kept else _new(nbytes, device)
        lent = _Lent(user, self._ended.append)
        lent.buffer, lent.key = buffer, key
        self._lent[lent] = nbytes
        self.peak_bytes = max(self.peak_bytes, used)
        return buffer


def _new(nbytes: int, device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return np.empty(nbytes, dtype=np.uint8)
