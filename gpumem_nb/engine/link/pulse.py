"""Signs of life: this rank gives one every second while a request takes long, and watches for the owner's.

The pulse runs on a thread of its own, beside whatever the main thread does, and ends the waiting for ranks that do not
come. Horovod has an inspector for stalls too, but not under every controller, and only rank 0 knows what it found.

Ranks end when the notebook kernel that owns them is gone, and take the rest of the cluster with them. On another host
than the kernel's its steward (``cluster/hosts/steward.py``) is the owner.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from ...shared import cluster_records
from ...shared.answers import Pulse, Waiting
from ...shared.messages import DeviceUse, Reading

PERIOD_S = 1.0
NAPS = 4
"""In which a period is slept through: a machine may be held up in the middle of it."""
LATE_S = 0.2
"""By how much later than it meant to a thread wakes up on a machine that is busy, but not held up."""
KEY = "pulse"
"""Under which the kernel finds the latest pulse beside a request's other data."""
_log = logging.getLogger(__name__)
Read = TypeVar("Read")


class Collectives(Protocol):
    """What :mod:`.collectives` tells and does; not imported here, because the kernel imports this module too."""

    def waiting(self) -> Waiting | None:
        """Return the collective waited in."""

    def left(self, since_s: float) -> Waiting | None:
        """Return the collective in which this rank came apart from the others."""

    def free(self, waited: Waiting) -> None:
        """End the waiting of all ranks, because this one has waited too long."""


class PulseThread(threading.Thread):
    """Publishes what this rank does, and frees it when it has waited in a collective for longer than the limit.

    Args:
        publish: sends a pulse beside the answer to a request, which the message that asked for it stands for.
        collectives: knows what is waited for, and ends it.
        step: the part of the step under way, in words, and when the step began (on ``time.monotonic``).
        reading: reads the device's memory.
        use: asks NVML about the device; called once a second while there is a request.
        limit_s: how long to wait for other ranks.
    """

    def __init__(
        self,
        publish: Callable[[Any, Pulse], None],
        collectives: Collectives,
        step: Callable[[], tuple[str, float]],
        reading: Callable[[], Reading],
        use: Callable[[], DeviceUse | None],
        limit_s: float,
    ) -> None:
        super().__init__(name="gpumem_nb pulse", daemon=True)
        self.limit_s = limit_s
        self._publish = publish
        self._collectives = collectives
        self._step = step
        self._reading = reading
        self._use = use
        self._held_up: list[tuple[float, float]] = []  # when it ended and how long it took, both in seconds

    def run(self) -> None:
        """Beat until the process ends, whatever happens in a beat: nothing else would free this rank."""
        woke_s = time.monotonic()
        while True:
            late_s = 0.0
            for _ in range(NAPS):
                time.sleep(PERIOD_S / NAPS)
                before_s, woke_s = woke_s, time.monotonic()
                late_s += woke_s - before_s - PERIOD_S / NAPS
            try:
                self.beat(late_s)
            except Exception:
                _log.exception("A sign of life could not be given.")

    def beat(self, late_s: float = 0.0) -> None:
        """Free the rank if it has waited for too long, and publish one pulse if its request takes long.

        A reading that fails is missing in the pulse. Raises what publishing does.

        Args:
            late_s: how much later than it was meant to it comes.
        """
        request = _request
        if request is None:
            return
        waiting = self._while_awake(self._collectives.waiting(), late_s)
        if waiting and waiting.seconds >= self.limit_s:
            self._collectives.free(waiting)  # before anything else, which might fail or hang
        use = _unless_it_fails(self._use)
        doing, began_s = (request.what, request.began_s) if request.what else self._step()
        seconds = time.monotonic() - max(began_s, request.began_s)
        if seconds < PERIOD_S:
            return
        seen = waiting or self._collectives.left(began_s)  # freed, but has not answered yet
        reading = _unless_it_fails(self._reading)
        self._publish(request.message, Pulse(doing, seconds, time.time(), seen, reading, use, self.limit_s))

    def _while_awake(self, waiting: Waiting | None, late_s: float) -> Waiting | None:
        """Return the same without the time in which this rank was held up: the others probably were too.

        A virtual machine that is paused, a laptop's lid, a debugger: afterwards ranks that had nothing left to do would
        give up those that had, at once.
        """
        if waiting is None:
            self._held_up.clear()
            return None
        now_s = time.monotonic()
        if late_s > LATE_S:
            self._held_up.append((now_s, late_s))
        since_s = now_s - waiting.seconds
        lost_s = sum(max(0.0, min(took_s, ended_s - since_s)) for ended_s, took_s in self._held_up)
        return replace(waiting, seconds=waiting.seconds - lost_s)


def _unless_it_fails(read: Callable[[], Read]) -> Read | None:
    try:
        return read()
    except Exception:
        return None


class _Request(NamedTuple):
    """What the main thread works on: in words (empty for training), since when, and the message that asked for it."""

    what: str
    message: Any
    began_s: float


_request: _Request | None = None


def began_s() -> float:
    """The begin of the main thread's request, on ``time.monotonic``."""
    return _request.began_s if _request else 0.0


@contextmanager
def request(what: str, message: Any) -> Iterator[None]:
    """Note that the main thread works on this request inside; pulses travel beside its answer."""
    global _request
    _request = _Request(what, message, time.monotonic())
    try:
        yield
    finally:
        _request = None


_OWNER_PERIOD_S = 2.0


def watch_owner(profile: Path) -> None:
    """Return never: once the kernel is gone, end the cluster as its record has it, and this process.

    One rank does it for all, ranks that are stopped or stuck included; the others end by themselves if it cannot.
    """
    found = cluster_records.find(profile)
    while found and found[1].kernel.runs:
        time.sleep(_OWNER_PERIOD_S)
    if not (found and _end_from_outside(found[0])):
        time.sleep(_OWNER_PERIOD_S)
    os._exit(1)


def _end_from_outside(record: Path) -> bool:
    """In a process that is not a rank, because MPI ends ranks at once when they lose those on another host."""
    command = [sys.executable, "-P", "-m", "gpumem_nb.shared.cluster_records", str(record)]
    nothing = subprocess.DEVNULL
    with suppress(OSError):
        done = subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
        return done.returncode == 0
    return False
