"""Ctrl-C is held back while the toolkit holds a lock: an interrupt inside Python's own locking can leave it locked."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
