"""A rank's answer to a request, and its progress reports while a request takes long."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .messages import DeviceUse, Reading


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception of code that ran on a rank, as text: the object itself would keep its frames' tensors alive."""

    ename: str
    evalue: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective, and for how many seconds a rank waits or waited in it."""

    collective: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life during a long request: for how many seconds a rank has worked, and what it waits in.

    ``time_s`` is the wall clock: a rank whose pulse is old does not run at all. ``limit_s`` is how long the rank waits
    for others before it frees itself.
    """

    doing: str
    seconds: float
    time_s: float
    waiting: Waiting | None
    reading: Reading | None = None
    device_use: DeviceUse | None = None
    limit_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Apart:
    """Horovod no longer joins a rank to the others: what it was doing, and the collective in which it came apart."""

    doing: str
    left: Waiting | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request, and whether the rank is still joined to the others (``apart`` is ``None``).

    ``notes`` are sentences about the rank's surroundings, said once. ``drew``: a cell has moved the random numbers
    that cells draw.

    ``content`` is a pickle of its own, so that the rest can be read where the content cannot: the value, or with
    ``raised`` the exception that came instead of it (a :class:`GpumemError` or :class:`Raised`). ``kind`` says in words
    what it is.
    """

    content: bytes
    kind: str
    apart: Apart | None = None
    raised: bool = False
    notes: tuple[str, ...] = ()
    drew: bool = False


Progress = Callable[[str, float], None]
"""Told what is being waited for, and how much of it is done (0 to 1)."""
