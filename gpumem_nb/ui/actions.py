"""What the panel's controls ask for is done in order, away from the kernel's own threads."""

from __future__ import annotations

import queue
from collections.abc import Callable

from ..shared.errors import GpumemError


class Actions:
    """Actions that wait for the thread that calls :meth:`work`: a step under way may take long, and the kernel must not
    wait for it.

    ``failed`` is told in words when an action was refused, ``done`` is called after each one.
    """

    def __init__(self, failed: Callable[[str], None], done: Callable[[], None]) -> None:
        self._failed = failed
        self._done = done
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def submit(self, action: Callable[[], object]) -> None:
        """Do this once everything submitted before is done."""
        self._queue.put(action)

    def close(self) -> None:
        """End once everything submitted before is done."""
        self._queue.put(None)

    def work(self) -> None:
        """Do what is asked for, in order, until :meth:`close`."""
        while action := self._queue.get():
            try:
                action()
            except GpumemError as error:
                self._failed(str(error))
            except Exception as error:
                self._failed(f"That did not work: {type(error).__name__}: {error}. Details: %hvd_status")
            self._done()
