"""Threads whose widget messages belong to no cell, and what runs on them in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from IPython.core.getipython import get_ipython

from ..internals.ipykernel_internals import speak_for_no_request
from ..shared.errors import GpumemError

Made = TypeVar("Made")


class OwnChanges(threading.local):
    """Distinguishes the program's changes to widgets, inside ``with``, from the user's, which come on another thread.

    Attributes:
        under_way: whether this thread is inside.
    """

    under_way = False

    def __enter__(self) -> None:
        self.under_way = True

    def __exit__(self, *_: object) -> None:
        self.under_way = False


def start(work: Callable[[], None], name: str) -> threading.Thread:
    """Run ``work`` on a thread whose widget messages belong to no cell.

    ipykernel delivers a user's action on a widget to the sender that last wrote to it, and takes a plain thread for
    the cell that runs: a control would wait for the cell to end.
    """

    def run() -> None:
        kernel = getattr(get_ipython(), "kernel", None)
        if kernel is not None:
            speak_for_no_request(kernel)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def make(what: Callable[[], Made]) -> Made:
    """Make widgets on such a thread, and wait for them."""
    made: list[Made] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            made.append(what())
        except BaseException as error:
            failed.append(error)

    start(work, "gpumem_nb widgets").join()
    if failed:
        raise failed[0]
    return made[0]


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
            self._thread = start(lambda: self._work(actions), f"gpumem_nb panel {self._name}")

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
