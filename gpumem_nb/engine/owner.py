"""Ranks end when the notebook kernel that owns them is gone, and take the rest of the cluster with them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress

import psutil

PERIOD_S = 2.0


def identify(pid: int) -> tuple[int, float]:
    """A process by pid and creation time, so that nobody else is ever taken for it."""
    return pid, psutil.Process(pid).create_time()


def watch(kernel: tuple[int, float], controller: tuple[int, float], profile: str) -> None:
    """Return never: end this process, the controller and the cluster's folder once the kernel is gone."""
    while _runs(*kernel):
        time.sleep(PERIOD_S)
    if _runs(*controller):
        with suppress(ProcessLookupError):
            os.kill(controller[0], signal.SIGTERM)
    shutil.rmtree(profile, ignore_errors=True)
    os._exit(1)


def _runs(pid: int, created: float) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
