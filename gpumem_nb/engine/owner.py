"""Ranks end when the notebook kernel that owns them is gone, and take the rest of the cluster with them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from .. import records
from ..processes import Identity

PERIOD_S = 2.0


def watch(kernel: Identity, record: Path) -> None:
    """Return never: once the kernel is gone, end the cluster as its record has it, and this process.

    One rank does it for all, ranks that are stopped or stuck included; the others end by themselves if it cannot.
    """
    while kernel.runs:
        time.sleep(PERIOD_S)
    if not records.claim_and_end(record, sparing=os.getpid()):
        time.sleep(PERIOD_S)
    os._exit(1)
