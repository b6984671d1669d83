"""Progress of what a magic waits for, once it takes longer than a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ..report.progress_bar import ProgressBar
from ..session import Session
from ..ui.cells import PATIENCE_S, progress_bar


def patient(title: str, measured: bool = False) -> AbstractContextManager[ProgressBar]:
    """Show progress of the block from the second second on; ``measured``: whether it is known how much is done."""
    return progress_bar(title, measured, PATIENCE_S)


@contextmanager
def asked(title: str, session: Session) -> Iterator[None]:
    """Show for how long the ranks have been asked, and what they do that takes long."""
    with patient(title) as progress, session.telling(progress):
        yield
