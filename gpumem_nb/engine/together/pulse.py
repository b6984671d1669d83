"""A sign of life every second while a request takes long, and an end to waiting for ranks that do not come.

Runs on a thread of its own, beside whatever the main thread does. Horovod has an inspector for stalls too, but not
under every controller, and only rank 0 knows what it found.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ...shared.messages import DeviceUse, Pulse, Reading, Waiting

PERIOD_S = 1.0
KEY = "pulse"
"""Under which the kernel finds the latest pulse beside a request's other data."""


class Collectives(Protocol):
    """What :mod:`.collectives` tells and does; not imported here, because the kernel imports this module too."""

    def waiting(self) -> Waiting | None:
        """The collective waited in."""

    def left(self, since_s: float) -> Waiting | None:
        """The collective in which this rank came apart from the others."""

    def free(self) -> None:
        """End the waiting of all ranks."""


class PulseThread(threading.Thread):
    """Publishes what this rank does, and frees it when it has waited in a collective for longer than the limit.

    Args:
        kernel: the engine, which publishes.
        collectives: knows what is waited for, and ends it.
        step: the part of the step under way, in words, and when the step began (on ``time.monotonic``).
        reading: reads the device's memory.
        use: asks NVML about the device; called once a second while there is a request.
        limit_s: how long to wait for other ranks.
    """

    def __init__(
        self,
        kernel: Any,
        collectives: Collectives,
        step: Callable[[], tuple[str, float]],
        reading: Callable[[], Reading],
        use: Callable[[], DeviceUse | None],
        limit_s: float,
    ) -> None:
        super().__init__(name="gpumem_nb pulse", daemon=True)
        self.limit_s = limit_s
        self._kernel = kernel
        self._collectives = collectives
        self._step = step
        self._reading = reading
        self._use = use

    def run(self) -> None:
        """Beat until the process ends."""
        while True:
            time.sleep(PERIOD_S)
            request = _request
            if request is None:
                continue
            use = self._use()
            doing, began_s = (request.what, request.began_s) if request.what else self._step()
            seconds = time.monotonic() - max(began_s, request.began_s)
            if seconds < PERIOD_S:
                continue
            waiting = self._collectives.waiting()
            seen = waiting or self._collectives.left(began_s)  # freed, but has not answered yet
            self._publish(request.message, Pulse(doing, seconds, time.time(), seen, self._reading(), use))
            if waiting and waiting.seconds >= self.limit_s:
                self._collectives.free()

    def _publish(self, message: Any, pulse: Pulse) -> None:
        publisher = self._kernel.shell.data_pub
        # A publisher of this thread's own: the shell's changes its parent with each request.
        own = type(publisher)(session=publisher.session, pub_socket=publisher.pub_socket)
        own.set_parent(message)
        own.publish_data({KEY: pulse})


class _Request:
    """What the main thread works on: in words (empty for training), since when, and the message that asked for it."""

    def __init__(self, what: str, message: Any) -> None:
        self.what = what
        self.message = message
        self.began_s = time.monotonic()


_request: _Request | None = None


@contextmanager
def request(what: str, message: Any) -> Iterator[None]:
    """The main thread works on this request; pulses travel beside its answer."""
    global _request
    _request = _Request(what, message)
    try:
        yield
    finally:
        _request = None
