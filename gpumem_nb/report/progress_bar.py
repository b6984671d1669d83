"""The one progress bar, tqdm's: a line that is rewritten in a terminal, a line now and then in a log.

It writes to a stream; ``ui/progress`` has one that rewrites the output of a notebook's cell.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm


class Lines(io.TextIOBase):
    """A stream that cannot rewrite, such as a log: a new line for each text."""

    encoding = "utf-8"  # for the characters of the bar

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Print it, without what would have rewritten the line before it."""
        if shown := text.strip():
            self._stream.write(shown + "\n")
            self._stream.flush()
        return len(text)


class _Meter(tqdm):  # type: ignore[misc]  # tqdm has no type information
    """Without the thread that refreshes bars by itself, and without a lock between processes: one thread draws here."""

    monitor_interval = 0


_Meter.set_lock(threading.RLock())


class ProgressBar:
    """One bar with a title; called as a :data:`~gpumem_nb.shared.answers.Progress`.

    Args:
        title: what is being done.
        stream: where to draw; each text that is written replaces the one before it, where that can be.
        rewrites: whether the stream replaces what was written before; otherwise only a new thing to wait for is drawn.
        measured: whether it is known how much is done; otherwise only the time is shown.
        patience_s: nothing is drawn before that, or at all where the work ends by then.
    """

    def __init__(
        self,
        title: str,
        stream: TextIO | io.TextIOBase,
        rewrites: bool,
        measured: bool = True,
        patience_s: float = 0.0,
    ) -> None:
        self._title = title
        self._stream = stream
        self.rewrites = rewrites
        self._began_s = time.monotonic()
        self._patience_s = patience_s
        self._what = ""
        parts = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}" if measured else "{desc}: {elapsed}{postfix}"
        self._meter = _Meter(
            total=1.0,
            desc=title,
            bar_format=parts,
            file=stream,
            leave=False,
            position=0,
            dynamic_ncols=True,
            delay=patience_s,
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began_s

    def __call__(self, what: str, done: float) -> None:
        """Draw what is being waited for (empty: as before), and how much is done (0 to 1)."""
        if self.elapsed_s < self._patience_s:
            return
        news = bool(what) and what != self._what
        if news:
            self._what = what
            self._meter.set_description_str(f"{self._title}: {what}", refresh=False)
        if news or self.rewrites:
            self.draw(done)

    def draw(self, done: float, left: str = "") -> None:
        """Draw how much is done (0 to 1), and in words how long it will still take."""
        self._meter.n = min(1.0, done)
        self._meter.set_postfix_str(left, refresh=False)
        self._meter.refresh()

    def end(self, why: BaseException | None = None) -> None:
        """Leave a line in place of the bar: how long the work took, or what was under way at an error, which is why."""
        self._meter.close()
        if self.elapsed_s < self._patience_s:
            return
        took = _duration(self.elapsed_s)
        said = f"done in {took}"
        if why is not None:
            at = f" ({self._what})" if self._what else ""
            said = f"{'interrupted' if isinstance(why, KeyboardInterrupt) else 'failed'} after {took}{at}"
        self._stream.write(f"{self._title}: {said}\n")
        self._stream.flush()


@contextmanager
def shown(bar: ProgressBar) -> Iterator[ProgressBar]:
    """End the bar with the block."""
    try:
        yield bar
    except BaseException as why:
        bar.end(why)
        raise
    bar.end()


def text_bar(title: str, stream: TextIO, measured: bool = True, patience_s: float = 0.0) -> ProgressBar:
    """Return a bar in a terminal, or lines in a log."""
    in_place = stream.isatty()
    return ProgressBar(title, stream if in_place else Lines(stream), in_place, measured, patience_s)


def left_s(done: float | None, elapsed_s: float, estimate_s: float | None) -> float | None:
    """Seconds still to come: from the pace so far once a tenth is done, before that from the usual duration."""
    if done and done >= 0.1:
        return elapsed_s * (1 - done) / done
    return None if estimate_s is None else max(0.0, estimate_s - elapsed_s)


def left_in_words(left: float | None) -> str:
    """Return how long it will still take; empty where that is not known."""
    if left is None:
        return ""
    return f"about {_duration(left)} left" if left > 0 else "nearly done"


def _duration(seconds: float) -> str:
    """``3.4 s`` below ten seconds, ``12 s`` below a minute, then tqdm's ``02:05``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return str(tqdm.format_interval(seconds))
