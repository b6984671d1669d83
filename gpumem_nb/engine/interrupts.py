"""Ctrl-C on a rank: delivered where a step can be abandoned, held back where the ranks must stay together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupts:
    """Takes over SIGINT while a chunk runs.

    Inside :meth:`raising` (the user's model, loss and data) it raises ``KeyboardInterrupt`` as usual, and the step is
    discarded on all ranks like any other that one rank could not finish. Elsewhere, between reduction and update, it
    is kept and raised at the next such place, because a rank that left there would leave the others waiting.
    """

    def __init__(self) -> None:
        self._pending = False
        self._raising = False

    def __enter__(self) -> Interrupts:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Where an interrupt may end the step."""
        self._raising = True
        try:
            self._raise_pending()
            yield
        finally:
            self._raising = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        if self._raising:
            self._raise_pending()

    def _raise_pending(self) -> None:
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt
