"""Time in tests: waiting for something, and promises in seconds, held against what the machine can give."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
HANG_S = 120.0
"""Whoever waits that long waits for ever; a busy machine needs many times as long as an idle one."""
_WORK = range(1_000_000)
_IDLE_S = 0.02  # for adding these up, on a machine of two cores with nothing else to do


def until(found: Callable[[], T], otherwise: Callable[[], object] = lambda: "it never came") -> T:
    """Ask until there is something, which is returned; fails with what there is ``otherwise``."""
    deadline = time.monotonic() + HANG_S
    while not (it := found()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.01)
    return it


def slowness() -> float:
    """How many times as long as an idle machine this one needs right now, at least 1; asking takes 0.06 s there."""

    def add_up() -> float:
        began = time.perf_counter()
        sum(_WORK)
        return time.perf_counter() - began

    return max(1.0, *(add_up() / _IDLE_S for _ in range(3)))


def in_time(took_s: float, promised_s: float) -> bool:
    """Whether something that has just happened took no longer than promised, on a machine with nothing else to do.

    On a slower or busier one it may take so many times as long as a piece of work that is always the same takes now.
    """
    return took_s < promised_s or took_s < promised_s * slowness()
