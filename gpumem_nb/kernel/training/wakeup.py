"""Waking of threads that wait for news."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

News = SimpleQueue[None]
_LONGEST_WAIT_S = 0.5  # in case something changes without a ring


class Wakeup:
    """Any thread may ring at any moment: that takes no lock, so ringing never waits.

    Those who wait listen on queues of their own and not on a condition, whose lock an interrupt could leave broken.
    """

    def __init__(self) -> None:
        self._listeners: list[News] = []

    def notify(self) -> None:
        """There is news."""
        for news in list(self._listeners):
            news.put(None)

    @contextmanager
    def listening(self) -> Iterator[News]:
        """Every ring inside is in the queue, also one that comes while no thread waits."""
        news: News = SimpleQueue()
        try:
            self._listeners.append(news)
            yield news
        finally:
            with suppress(ValueError):
                self._listeners.remove(news)

    def wait_until(self, true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until something is true, looking at each ring; says whether it is, at the latest after ``timeout`` s."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self.listening() as news:
            while not true() and (left := deadline - time.monotonic()) > 0:
                wait(news, min(left, _LONGEST_WAIT_S))
        return true()


def wait(news: News, timeout: float) -> None:
    """Wait for a ring, and take all that there are."""
    with suppress(Empty):
        news.get(timeout=timeout)
        while True:
            news.get_nowait()
