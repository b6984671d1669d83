"""What travels between kernel and ranks for a trace, and what its file is made of."""

from __future__ import annotations

from dataclasses import dataclass

TIMELINE = "HOROVOD_TIMELINE"
"""Horovod's variable, read when it starts: the file of its timeline."""
HEAD = b'{"displayTimeUnit": "ms", "otherData": {"written by": "gpumem_nb"}, "traceEvents": [\n'
BETWEEN = b",\n"
TAIL = b"\n]}\n"


@dataclass(frozen=True, slots=True)
class TraceOrder:
    """How each rank writes its part of a trace.

    Attributes:
        titles: what the ranks are called, by their numbers.
        later_s: for each rank how many seconds its host's clock is behind that of rank 0's host.
        origin_s: when the trace begins, by the clock of rank 0's host.
    """

    titles: tuple[str, ...]
    later_s: tuple[float, ...]
    origin_s: float


@dataclass(frozen=True, slots=True)
class TracePart:
    """What a rank has to add to a trace: so many events, in so many compressed bytes; or why it has nothing."""

    events: int = 0
    size_bytes: int = 0
    problem: str = ""
