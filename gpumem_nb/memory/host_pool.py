"""Host memory in which a rank puts aside what its GPU needs later; counted by itself, never as the device's."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch

from ..shared.errors import WorkloadError
from ..shared.processes import available_bytes
from ..shared.units import format_bytes

_SPARE = 0.8  # of what the machine has free; the rest is for its other programs


class HostPool:
    """Buffers of host memory that are used again from step to step; pinned for a real GPU.

    For a virtual GPU they are NumPy's: torch's allocator, by whose bytes a virtual GPU is counted, never sees them.

    Args:
        ranks: how many share what the machine has free now.

    Attributes:
        used_bytes: of the buffers in use now.
        peak_bytes: their highest since the last step began.
        limit_bytes: what this rank may use.
    """

    def __init__(self, ranks: int) -> None:
        self.limit_bytes = int(_SPARE * available_bytes() / ranks)
        self.used_bytes = self.peak_bytes = 0
        self._free = defaultdict[tuple[str, int], list[Any]](list)
        self._asked = set[tuple[str, int]]()

    def begin(self) -> None:
        """A step begins: buffers of sizes that the last one had no use for are given back to the system."""
        for key in set(self._free) - self._asked:
            del self._free[key]
        self._asked, self.peak_bytes = set(), self.used_bytes

    def take(self, nbytes: int, device: torch.device) -> Any:
        """Return a buffer: an array of bytes, or a pinned tensor of them for a real GPU.

        Raises:
            WorkloadError: it would be more than the limit.
        """
        if self.used_bytes + nbytes > self.limit_bytes:
            raise WorkloadError(
                f"Host memory is short: {format_bytes(self.used_bytes + nbytes)} were to wait there for backward, and "
                f"this rank may use {format_bytes(self.limit_bytes)}, its part of what the machine had free. Use "
                "offload_activations=off, or a smaller batch_size."
            )
        key = device.type, nbytes
        self._asked.add(key)
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if kept := self._free[key]:
            return kept.pop()
        if device.type == "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return np.empty(nbytes, dtype=np.uint8)

    def give_back(self, buffer: Any, nbytes: int, device: torch.device) -> None:
        """Take a buffer back."""
        self.used_bytes -= nbytes
        self._free[device.type, nbytes].append(buffer)
