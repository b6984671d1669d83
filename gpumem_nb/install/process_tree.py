"""Ending a process of ours together with everything it started."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil

GRACE_S = 5.0
"""Between asking a process to end and ending it."""


def stop_tree(pid: int) -> None:
    """End a process of ours and everything it started."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for member in family:
        signal_quietly(member.terminate)
    for member in psutil.wait_procs(family, timeout=GRACE_S)[1]:
        signal_quietly(member.kill)
    psutil.wait_procs(family, timeout=GRACE_S)


def signal_quietly(send: Callable[[], None]) -> None:
    """Send a signal to a process that may have ended by itself meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        send()
