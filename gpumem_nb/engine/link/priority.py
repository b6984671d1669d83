"""On the CPU, communication gives way to computation."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Waiting ranks yield their core, but to the scheduler a thread that yields in a loop is as hungry as one that computes.
# Five to ten steps of niceness let the training threads have the cores: on two cores 1.3 × the samples/s with four
# ranks (digits-resnet and text-gpt), and no change with two.
NICENESS = 10
_THREADS = Path("/proc/self/task")


@contextmanager
def new_threads_give_way() -> Iterator[set[int]]:
    """Threads that start inside run with lower priority than those that were there before.

    The set holds them afterwards, by the system's numbers.
    """
    before, new = _thread_ids(), set[int]()
    yield new
    new |= _thread_ids() - before
    for thread in new:
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)


def give_way() -> None:
    """Let the calling thread run with lower priority."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _thread_ids() -> set[int]:
    return {int(path.name) for path in _THREADS.iterdir()}
