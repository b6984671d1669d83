"""Run the actions of the panel's controls in order, away from the kernel's own threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ..shared.errors import GpumemError
from . import threads

Queue = queue.SimpleQueue[Callable[[], object] | None]


class Actions:
    """Actions that wait for a thread: a step under way may take long, and the kernel must not wait for it.

    ``failed`` is told in words when an action was refused, unless this was closed meanwhile; ``done`` is called after
    each one.
    """

    def __init__(self, name: str, failed: Callable[[str], None], done: Callable[[], None]) -> None:
        self._name = name
        self._failed = failed
        self._done = done
        self._queue = Queue()
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable[[], object]) -> None:
        """Do this once everything submitted before is done."""
        self._queue.put(action)

    def start(self) -> None:
        """Do what is submitted, on a thread that ends with :meth:`close`."""
        if self._thread is None:
            actions = self._queue
            self._thread = threads.start(lambda: self._work(actions), f"gpumem_nb panel {self._name}")

    def close(self) -> None:
        """End the thread once it has done everything submitted before; :meth:`start` begins with an empty queue."""
        self._queue.put(None)
        self._queue, self._thread = Queue(), None

    def _work(self, actions: Queue) -> None:
        while action := actions.get():
            try:
                action()
            except GpumemError as error:
                self._tell(actions, str(error))
            except Exception as error:
                self._tell(actions, f"That did not work: {type(error).__name__}: {error}. Details: %hvd_status")
            self._done()

    def _tell(self, actions: Queue, why: str) -> None:
        if actions is self._queue:
            self._failed(why)
