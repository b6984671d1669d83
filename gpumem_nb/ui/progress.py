"""What a start is waiting for: a bar in a notebook, one line that is rewritten in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

Progress = Callable[[str, float], None]
"""Told what is being waited for, and how much of it is done (0 to 1)."""


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Show progress until the block ends, then how long it took, or what it was at when it failed."""
    notebook = getattr(get_ipython(), "kernel", None) is not None
    bar: _Bar | _Line = _Bar(title) if notebook else _Line(title)
    began = time.perf_counter()
    bar("", 0.0)
    try:
        yield bar
    except BaseException:
        bar.end(f"{title}: failed after {time.perf_counter() - began:.1f} s, while {bar.what}")
        raise
    bar.end(f"{title}: done in {time.perf_counter() - began:.1f} s")


class _Bar:
    """Plain HTML and not a widget: it stays readable in a notebook that is saved and opened without a kernel."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._handle: Any = None
        self.what = "starting"

    def __call__(self, what: str, done: float) -> None:
        self.what = what or self.what
        text = f"{self._title}: {what}" if what else self._title
        style = "width: min(24em, 50%); height: 1.2em; vertical-align: middle; margin-right: 1em"
        label = escape(self._title, quote=True)
        self._show(f'<progress max="1" value="{done:.3f}" aria-label="{label}" style="{style}"></progress>', text)

    def end(self, text: str) -> None:
        self._show("", text)

    def _show(self, bar: str, text: str) -> None:
        bundle = {"text/plain": text, "text/html": f"<div>{bar}<span>{escape(text)}</span></div>"}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class _Line:
    """On standard error: rewritten in place in a terminal, a new line for each new thing in a log."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._in_place = sys.stderr.isatty()
        self.what = "starting"

    def __call__(self, what: str, done: float) -> None:
        if self._in_place:
            self._write(f"\r\033[K{self._title}: {done:4.0%} {what}")
        elif what and what != self.what:
            self._write(f"{self._title}: {what}\n")
        self.what = what or self.what

    def end(self, text: str) -> None:
        self._write(f"\r\033[K{text}\n" if self._in_place else f"{text}\n")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
