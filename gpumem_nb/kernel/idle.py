"""Ranks that nobody uses hold memory that others need: after a while without work they are stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PERIOD_S = 1.0
NOTICE = 0.1
"""The last part of the time, in which the coming end is announced."""


class IdleWatch:
    """A thread that waits for nothing to happen, until :meth:`stop`.

    Args:
        minutes: after how many to stop, asked anew each time; ``None`` for never.
        busy: whether there is work right now.
        expired: called when there was none for that long, on this thread, whose own work does not count.
    """

    def __init__(
        self, minutes: Callable[[], float | None], busy: Callable[[], bool], expired: Callable[[], None]
    ) -> None:
        self._minutes = minutes
        self._busy = busy
        self._expired = expired
        self._worked_s = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="gpumem_nb idle", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Somebody works."""
        if threading.current_thread() is not self._thread:
            self._worked_s = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether nobody has worked for as long as it takes."""
        if self._busy():
            self._worked_s = time.monotonic()
        return self._left_s() <= 0

    def stop(self) -> None:
        """Wait no more."""
        self._done.set()

    def notice(self) -> str:
        """In words, how soon the ranks will be stopped; empty while that is far away."""
        minutes = self._minutes()
        left_s = self._left_s()
        if minutes is None or left_s > NOTICE * minutes * 60:
            return ""
        left = f"{left_s / 60:.0f} minutes" if left_s > 90 else f"{max(0.0, left_s):.0f} s"
        return f"nobody works here: the ranks stop in {left} (idle_minutes={minutes:g})"

    def _left_s(self) -> float:
        minutes = self._minutes()
        return float("inf") if minutes is None else minutes * 60 - (time.monotonic() - self._worked_s)

    def _wait(self) -> None:
        while not self._done.wait(max(0.01, min(PERIOD_S, self._left_s()))):
            if self.over:
                self._expired()
