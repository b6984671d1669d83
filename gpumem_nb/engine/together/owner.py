"""Ranks end when the notebook kernel that owns them is gone, and take the rest of the cluster with them.

On another host than the kernel's its steward (``cluster/hosts/steward.py``) is the owner.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ...shared import cluster_records

PERIOD_S = 2.0


def watch(profile: Path) -> None:
    """Return never: once the kernel is gone, end the cluster as its record has it, and this process.

    One rank does it for all, ranks that are stopped or stuck included; the others end by themselves if it cannot.
    """
    found = cluster_records.find(profile)
    while found and found[1].kernel.runs:
        time.sleep(PERIOD_S)
    if not (found and _end_from_outside(found[0])):
        time.sleep(PERIOD_S)
    os._exit(1)


def _end_from_outside(record: Path) -> bool:
    """In a process that is not a rank, because MPI ends ranks at once when they lose those on another host."""
    command = [sys.executable, "-m", "gpumem_nb.shared.cluster_records", str(record)]
    nothing = subprocess.DEVNULL
    with suppress(OSError):
        done = subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
        return done.returncode == 0
    return False
