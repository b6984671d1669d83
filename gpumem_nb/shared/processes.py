"""Processes that can be told apart from all others, and the cores and memory that this one may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

HOSTS_OWN = 0xEFFFFFFC
"""The number of the host's own namespace of processes: PROC_PID_INIT_INO of Linux (include/linux/proc_ns.h)."""
STOPPED = "T"
_ENDED = "ZXx"  # a zombie has ended: only its parent has not asked how yet, and in a container it may never ask


class Identity(NamedTuple):
    """A process beyond doubt. ``started`` is in clock ticks after boot, which no change of the clock can move."""

    pid: int
    started: int

    @property
    def state(self) -> str:
        """The letter that Linux has for what it does, such as ``R``, or :data:`STOPPED`; empty when it has ended."""
        started, state = _look(self.pid)
        return state if started == self.started and state not in _ENDED else ""

    @property
    def shell(self) -> str:
        """Return the prefix of a shell command that reaches it: empty on this machine."""
        return ""

    @property
    def runs(self) -> bool:
        """Return whether it has not ended."""
        return bool(self.state)

    def signal(self, number: int) -> bool:
        """Send it a signal, and return whether it was there to get it."""
        if not self.runs:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def identify(pid: int) -> Identity | None:
    """Return the process that has this pid now; ``None`` if there is none."""
    started, state = _look(pid)
    return Identity(pid, started) if state and state not in _ENDED else None


def marked(mark: str) -> Iterator[Identity]:
    """This user's processes that carry a word in their environment, which goes down to everything that they start."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        who = identify(int(folder.name))
        try:
            environment = (folder / "environ").read_bytes() if who else b""
        except OSError:  # another user's, or gone
            continue
        if who and mark.encode() in environment:
            yield who


def _look(pid: int) -> tuple[int, str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0, ""
    words = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    return int(words[19]), words[0]


ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cores() -> int:
    """Whole cores, at least 1; a quota of two and a half counts as two."""
    allowed = float(len(os.sched_getaffinity(0)))
    for group in control_groups("cpu"):
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
    for group in control_groups("memory"):
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


def control_groups(controller: str) -> Iterator[Path]:
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
