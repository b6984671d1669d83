"""Signals to a rank: an interrupt is delivered where work can be abandoned; a nudge asks all ranks to end the chunk.

A nudge goes to one rank, and all ranks agree upon it with the next reduction. So chunks can be long, which costs less,
and a flip or a cell still waits for no more than the step under way. Nudges are counted, because those sent before a
chunk was made are no reason to end it; signals that came as one are made up for at the next chunk.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ...internals.ipykernel_internals import leave_interrupts_alone

NUDGE = signal.SIGUSR1
_pending = False
_interruptible = False


def take_over(kernel: Any) -> None:
    """Handle SIGINT here from now on, in place of the IPython kernel.

    The kernel lets it raise anywhere in a request. A rank that left between reduction and update, or before it took
    part in a chunk at all, would leave the others waiting.
    """
    leave_interrupts_alone(kernel)
    signal.signal(signal.SIGINT, _on_signal)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let an interrupt raise ``KeyboardInterrupt`` inside: the user's model, loss and data, and cells."""
    global _interruptible
    _interruptible = True
    try:
        _raise_pending()
        yield
    finally:
        _interruptible = False


@contextmanager
def postponed() -> Iterator[None]:
    """Inside, an interrupt waits for the end, where it raises if it may there: for what must not be left half way."""
    global _interruptible
    before, _interruptible = _interruptible, False
    try:
        yield
    finally:
        _interruptible = before
    if before:
        _raise_pending()


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, an interrupt waits for the next :func:`interruptible` part; one from before is forgotten."""
    global _pending, _interruptible
    _pending = _interruptible = False  # one that came as an interruptible part ended has left it open
    try:
        yield
    finally:
        _pending = False


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Inside, code may handle interrupts and nudges in its own way; afterwards they are handled as before.

    IPython's kernel does the same for interrupts, before each cell.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, NUDGE)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # of C code
                signal.signal(number, handler)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _pending
    _pending = True
    if _interruptible:
        _raise_pending()


def _raise_pending() -> None:
    global _pending
    if _pending:
        _pending = False
        raise KeyboardInterrupt


_received = 0


def listen_for_nudges() -> None:
    """Count nudges from now on."""
    signal.signal(NUDGE, _count)


def catch_up(sent: int) -> None:
    """A chunk begins, made after this many nudges."""
    global _received
    _received = max(_received, sent)


def nudged_since(sent: int) -> bool:
    """Return whether this rank was nudged since a chunk was made."""
    return _received > sent


def _count(number: int, frame: Any) -> None:
    global _received
    _received += 1
