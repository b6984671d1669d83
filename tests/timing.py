"""Time in tests: waiting for something, and promises in seconds, held against what the machine can give."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import TypeVar

T = TypeVar("T")
HANG_S = 120.0
"""Whoever waits that long waits for ever; a busy machine needs many times as long as an idle one."""
_WORK = range(1_000_000)
_IDLE_S = 0.02  # for adding these up, on a machine of two cores with nothing else to do
# A virtual machine is paused as a whole now and then, for seconds, and nobody in it could have been faster. A process
# that does nothing but wake up notices; it ends with this one, whose end closes its input.
_WATCH = """
import os, select, time
print(flush=True)
last = time.monotonic()
while True:
    asked = select.select([0], [], [], 0.02)[0]
    now = time.monotonic()
    if now - last > 0.25:
        print(last, now, flush=True)
    last = now
    if asked:
        if not os.read(0, 1):
            break
        print("told", flush=True)
"""
_watch = subprocess.Popen(
    [sys.executable, "-c", _WATCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
)
assert _watch.stdout
assert _watch.stdin
_watch.stdout.readline()  # it watches
_pauses: list[tuple[float, float]] = []  # from when to when, on the clock of ``time.monotonic``
PATIENCE = "GPUMEM_NB_TESTS_PATIENCE"
"""The environment variable that says how many times as long as promised something may take."""


def until(found: Callable[[], T], otherwise: Callable[[], object] = lambda: "it never came") -> T:
    """Ask until there is something, which is returned; fails with what there is ``otherwise``."""
    deadline = time.monotonic() + HANG_S
    while not (it := found()):
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.01)
    return it


@contextmanager
def stop_pressed_in(code: CodeType) -> Iterator[None]:
    """Inside, stop is pressed once the main thread is in this code."""
    main, over = threading.main_thread().ident or 0, threading.Event()

    def press() -> None:
        while not over.wait(0.01):
            if code in [frame.f_code for frame, _ in traceback.walk_stack(sys._current_frames()[main])]:
                signal.pthread_kill(main, signal.SIGINT)
                return

    presses = threading.Thread(target=press)
    presses.start()
    try:
        yield
    finally:
        over.set()
        presses.join()


def slowness() -> float:
    """How many times as long as an idle machine this one needs right now, at least 1; asking takes 0.06 s there."""

    def add_up() -> float:
        began = time.perf_counter()
        sum(_WORK)
        return time.perf_counter() - began

    return max(1.0, *(add_up() / _IDLE_S for _ in range(3)))


def patience() -> float:
    """Return how many times as long as promised something may take.

    The first tier runs on machines that other programs use: how slow one is now says little about a moment ago.
    """
    return float(os.environ.get(PATIENCE, "1"))


def paused_s(since_s: float) -> float:
    """For how many seconds this machine was held up as a whole since then, on the clock of ``time.monotonic``."""
    assert _watch.stdin
    assert _watch.stdout
    _watch.stdin.write(b"?")
    while (line := _watch.stdout.readline()) != b"told\n":
        began_s, ended_s = map(float, line.split())
        _pauses.append((began_s, ended_s))
    return sum(max(0.0, ended_s - max(began_s, since_s)) for began_s, ended_s in _pauses)


def in_time(took_s: float, promised_s: float) -> bool:
    """Whether something that has just happened took no longer than promised, on a machine with nothing else to do.

    On a slower or busier one it may take so many times as long as a piece of work that is always the same takes now,
    and :func:`patience` times that. While the machine is held up as a whole no time passes.
    """
    if took_s < promised_s:
        return True
    began_s = time.monotonic() - took_s
    return took_s - paused_s(began_s) < promised_s * slowness() * patience()
