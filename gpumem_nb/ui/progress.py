"""Progress of a start and of other long calls, in a notebook, in a terminal and in a log.

A notebook gets tqdm's text and not its widget: of a widget a saved notebook keeps only how it looked at first, which is
0 %, whereas text is kept as it was shown last, with how long it took.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display

from ..report.progress_bar import ProgressBar, shown, text_bar


def progress_bar(title: str, measured: bool = True) -> AbstractContextManager[ProgressBar]:
    """Show progress until the block ends, then how long it took, or what was under way when it failed.

    ``measured``: whether it is known how much is done; otherwise only the time is shown.
    """
    notebook = getattr(get_ipython(), "kernel", None) is not None
    if notebook:
        return shown(ProgressBar(title, _Output(), rewrites=True, measured=measured))
    return shown(text_bar(title, sys.stderr, measured))


class _Output:
    """An output of the cell that runs, which holds what was written last."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._handle: Any = None

    def write(self, text: str) -> None:
        """Show it in place of what was there; nothing where tqdm clears its line."""
        bundle = {"text/plain": text.strip()}
        if not text.strip():
            return
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def flush(self) -> None:
        """Everything is shown at once."""
