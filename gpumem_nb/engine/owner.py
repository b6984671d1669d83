"""Ranks end when the notebook kernel that owns them is gone, and take the rest of the cluster with them.

On another host than the kernel's its steward (``cluster/steward.py``) is the owner.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from .. import records

PERIOD_S = 2.0


def watch(profile: Path) -> None:
    """Return never: once the kernel is gone, end the cluster as its record has it, and this process.

    One rank does it for all, ranks that are stopped or stuck included; the others end by themselves if it cannot.
    """
    found = records.of(profile)
    while found and found[1].kernel.runs:
        time.sleep(PERIOD_S)
    if not (found and records.claim_and_end(found[0], sparing=os.getpid())):
        time.sleep(PERIOD_S)
    os._exit(1)
