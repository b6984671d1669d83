"""Threads whose widget messages belong to no cell."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from IPython.core.getipython import get_ipython

from ..internals.ipykernel_internals import speak_for_no_request

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
