"""Somebody presses stop while the notebook waits for its ranks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from gpumem_nb.session import Session
from tests import internals
from tests.timing import until

PROMPT_S = 2.0


class Stop:
    """Presses stop once something is true; says how long the prompt took to come back."""

    _latest: Stop | None = None

    def __init__(self, when: Callable[[], bool], times: int = 1) -> None:
        Stop._latest = self
        self._given_up = False
        self._when = when
        self._times = times
        self._pressed_s = 0.0
        self._thread = threading.Thread(target=self._press)
        self._thread.start()

    def _press(self) -> None:
        until(lambda: self._given_up or self._when())
        if self._given_up:
            return
        self._pressed_s = time.monotonic()
        for number in range(self._times):
            if number:
                time.sleep(0.3)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    @classmethod
    def give_up(cls) -> None:
        """Press no more: the test is over, and may have failed before what this waits for."""
        if cls._latest:
            cls._latest._given_up = True
            cls._latest._thread.join()

    def took_s(self) -> float:
        back_s = time.monotonic()
        self._thread.join()
        return back_s - self._pressed_s


def asked(session: Session) -> Callable[[], bool]:
    """Whether a rank has a request of somebody who waits for it."""
    return lambda: internals.somebody_waits_for_ranks(session)
