"""Protection from Ctrl-C where work must not stop half way: under a lock, or while kernel and ranks disagree.

An interrupt inside Python's own locking can leave the lock locked for good.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType


@contextmanager
def shielded() -> Iterator[None]:
    """Inside, an interrupt of the main thread waits for the end. Only for what takes a fraction of a second."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(*pressed[0])


def finish_anyway(work: Callable[[], None], name: str) -> None:
    """Do something that must be finished: after an interrupt it goes on, on a thread of its own.

    Raises:
        KeyboardInterrupt: stop was pressed while waiting for it.
        Exception: whatever ``work`` raised.
    """
    news: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            news.put(error)
        else:
            news.put(None)

    with shielded():  # interrupted before it has begun, the caller would think that it goes on
        threading.Thread(target=run, name=name).start()
    if error := news.get():
        raise error


def let_finish(name: str, timeout_s: float = math.inf) -> None:
    """Wait for the work of this name that an interrupt has left to finish by itself."""
    until_s = time.monotonic() + timeout_s
    for thread in threading.enumerate():
        if thread.name == name and thread is not threading.current_thread():
            # An interrupt inside of join() makes Python take the thread for ended.
            while thread.is_alive() and time.monotonic() < until_s:
                with shielded():
                    thread.join(0.1)
