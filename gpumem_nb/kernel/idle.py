"""Idle ranks hold memory that others may need: after a while without work they are stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)
PERIOD_S = 1.0
NOTICE = 0.1
"""The last part of the time, in which the coming end is announced."""


class IdleWatch:
    """Notices that nothing has happened for long: on a thread of its own from :meth:`start` to :meth:`stop`.

    Args:
        minutes: after how many to stop, asked anew each time; ``None`` for never.
        busy: whether there is work right now.
        expired: called when there was none for that long; what it does itself does not count as work.
        clock: seconds that pass evenly.
    """

    def __init__(
        self,
        minutes: Callable[[], float | None],
        busy: Callable[[], bool],
        expired: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._minutes = minutes
        self._busy = busy
        self._expired = expired
        self._clock = clock
        self._worked_s = clock()
        self._done = threading.Event()
        self._expiring: threading.Thread | None = None  # whose work does not count

    def start(self) -> None:
        """Look now and then, on a thread of its own."""
        threading.Thread(target=self._wait, name="gpumem_nb idle", daemon=True).start()

    def look(self) -> None:
        """Look once whether it is time, and call ``expired`` if so."""
        if self.over:
            self._expiring = threading.current_thread()
            try:
                self._expired()
            finally:
                self._expiring = None

    def touch(self) -> None:
        """Note that the session is used."""
        if threading.current_thread() is not self._expiring:
            self._worked_s = self._clock()

    def put_off(self) -> None:
        """Restart the idle time, also from the thread that is ending the session."""
        self._worked_s = self._clock()

    @property
    def over(self) -> bool:
        """Return whether the session was unused for the whole time limit."""
        if self._busy():
            self._worked_s = self._clock()
        return self._left_s() <= 0

    def stop(self) -> None:
        """Look no more."""
        self._done.set()

    def notice(self) -> str:
        """In words, how soon the ranks will be stopped; empty while that is far away."""
        minutes = self._minutes()
        left_s = self._left_s()
        if minutes is None or left_s > NOTICE * minutes * 60:
            return ""
        left = f"{left_s / 60:.0f} minutes" if left_s > 90 else f"{max(0.0, left_s):.0f} s"
        return f"the session is idle: the ranks stop in {left} (idle_minutes={minutes:g})"

    def _left_s(self) -> float:
        minutes = self._minutes()
        return float("inf") if minutes is None else minutes * 60 - (self._clock() - self._worked_s)

    def _wait(self) -> None:
        while not self._done.wait(max(0.01, min(PERIOD_S, self._left_s()))):
            try:
                self.look()
            except Exception:  # it is tried again
                _log.exception("An idle session could not be stopped.")
