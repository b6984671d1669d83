"""What a trace that was written holds, and what to open it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..shared.units import format_bytes


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace of all ranks.

    Attributes:
        path: of the file.
        steps: the numbers of those recorded.
        wanted: how many were asked for.
        ranks: of how many ranks.
        events: all that is in it.
        size_bytes: the file's size.
    """

    path: Path
    steps: tuple[int, ...]
    wanted: int
    ranks: int
    events: int
    size_bytes: int

    def __str__(self) -> str:
        fewer = f" ({self.wanted} were asked for: an evaluation came)" if len(self.steps) < self.wanted else ""
        return (
            f"Written: {self.path} ({format_bytes(self.size_bytes)}).\n"
            f"It has {steps_in_words(self.steps)} of {self.ranks} ranks in {self.events:,} events{fewer}.\n"
            "Open it at https://ui.perfetto.dev, which reads it in your browser, or in chrome://tracing."
        )

    __repr__ = __str__


def steps_in_words(steps: Sequence[int]) -> str:
    """Of steps in a row which they are."""
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
