"""The kernel asks for the ranks' attention: a signal to one of them, agreed upon by all with the next reduction.

So chunks can be long, which costs less, and a flip or a cell still waits for no more than the step under way. Nudges
are counted, because those sent before a chunk was made are no reason to end it; signals that came as one are made up
for at the next chunk.
"""

from __future__ import annotations

import signal
from typing import Any

SIGNAL = signal.SIGUSR1
_received = 0


def listen() -> None:
    """Count nudges from now on."""
    signal.signal(SIGNAL, _count)


def catch_up(sent: int) -> None:
    """A chunk begins, made after this many nudges."""
    global _received
    _received = max(_received, sent)


def newer_than(sent: int) -> bool:
    """Return whether this rank was nudged since a chunk was made."""
    return _received > sent


def _count(number: int, frame: Any) -> None:
    global _received
    _received += 1
