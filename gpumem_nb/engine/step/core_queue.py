"""The time for which a thread was ready to run without a core, as Linux counts it (proc(5), ``schedstat``)."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

_LONGEST = 80  # three whole numbers


class CoreQueue:
    """Of the thread that makes it. Reading takes some microseconds."""

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    def waited_s(self) -> float | None:
        """Since the thread began; ``None`` where the system does not tell."""
        if self._file is None:
            return None
        with suppress(OSError, ValueError):
            ran_ns, waited_ns, _ = os.pread(self._file, _LONGEST, 0).split()
            return int(waited_ns) / 1e9 if int(ran_ns) else None
        return None
