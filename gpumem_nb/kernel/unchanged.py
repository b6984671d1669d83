"""Tells whether what is trained is still what it was, for questions that take long."""

from __future__ import annotations

from .history import History


class Changed(Exception):
    """What is trained may have changed while it was being looked at."""


class Unchanged:
    """What is trained, as it was when this was made."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._was = self._is

    def check(self) -> None:
        """Raise :class:`Changed` if it may be something else by now."""
        if self._is != self._was:
            raise Changed("something was loaded, or a cell ran on the ranks and may have changed the model.")

    @property
    def _is(self) -> tuple[int, int]:
        return self._history.loaded_as, self._history.model_version
