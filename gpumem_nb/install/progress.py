"""One line that says what a long step is doing, for how long already, and for how long about to come."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

PLAIN_INTERVAL_S = 15.0
"""Between two lines where there is no terminal to rewrite one on."""


def unknown() -> float | None:
    """The fraction done of a step that cannot tell."""
    return None


class Progress:
    """While the ``with`` block runs, keep one line up to date; at its end leave a line with the time it took.

    Args:
        title: what is being done.
        fraction: called now and then, returns how much is done (0 to 1) or ``None``.
        estimate_s: how long the step usually takes, for as long as ``fraction`` cannot say.
    """

    def __init__(
        self,
        title: str,
        fraction: Callable[[], float | None] = unknown,
        estimate_s: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.title = title
        self.fraction = fraction
        self.estimate_s = estimate_s
        self.stream = stream or sys.stdout
        self.rewrites = self.stream.isatty()
        self.started = time.monotonic()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._keep_showing, name="gpumem-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._show(f"{self.title} ...")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        self._thread.join()
        outcome = "done" if kind is None else "failed"
        self._show(f"{self.title}: {outcome} in {clock(self.elapsed_s)}", last=True)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self.started

    def line(self) -> str:
        """What to show now."""
        words = [f"{self.title} ... {clock(self.elapsed_s)}"]
        done = self.fraction()
        if done:
            words.append(f"{done:.0%}")
        left = self.left_s(done)
        if left is not None:
            words.append(f"about {clock(left)} left" if left > 0 else "nearly done")
        return ", ".join(words)

    def left_s(self, done: float | None) -> float | None:
        """Seconds still to come: from the pace so far once a tenth is done, before that from the usual duration."""
        if done and done >= 0.1:
            return self.elapsed_s * (1 - done) / done
        return None if self.estimate_s is None else max(0.0, self.estimate_s - self.elapsed_s)

    def _keep_showing(self) -> None:
        while not self._finished.wait(1.0 if self.rewrites else PLAIN_INTERVAL_S):
            self._show(self.line())

    def _show(self, text: str, last: bool = False) -> None:
        if self.rewrites:
            self.stream.write(f"\r\x1b[K{text}" + ("\n" if last else ""))
        else:
            self.stream.write(text + "\n")
        self.stream.flush()


def clock(seconds: float) -> str:
    """Minutes and seconds, ``2:05``; below a minute ``12 s``, below ten seconds ``3.4 s``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
