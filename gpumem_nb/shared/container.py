"""Cores and memory that this process may use: the host's, or those of its container (Linux control groups)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cores() -> int:
    """Whole cores, at least 1; a quota of two and a half counts as two."""
    allowed = float(len(os.sched_getaffinity(0)))
    for group in _groups("cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (group / "cpu.max").read_text().split()  # ``max 100000`` is no quota
            allowed = min(allowed, int(quota) / int(period))
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            allowed = min(allowed, int(quota) / int(period) if int(quota) > 0 else math.inf)
    return max(1, int(allowed))


def available_bytes() -> int:
    """Memory that can be used yet."""
    available = int(psutil.virtual_memory().available)
    for group in _groups("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError):
                free = int((group / limit).read_text()) - int((group / used).read_text()) + _cached_bytes(group)
                available = min(available, max(0, free))
    return available


def _cached_bytes(group: Path) -> int:
    """Return how many bytes of a group's memory are file cache, which the system gives up first."""
    with suppress(OSError):
        found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(found.get("inactive_file", 0))
    return 0


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and its parents, for version 2 or a controller of version 1."""
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = ROOT / controllers if controllers else ROOT
            folder = base / path.lstrip("/")
            yield folder
            yield from (parent for parent in folder.parents if parent == base or base in parent.parents)
