"""Tells whether what is trained is still what it was, for questions that take long."""

from __future__ import annotations

from collections.abc import Callable

from ..shared.settings import Settings
from .history import History


class Changed(Exception):
    """What is trained may have changed while it was being looked at."""


class Unchanged:
    """What is trained, as it was when this was made; and under which settings, where they are asked for."""

    def __init__(self, history: History, settings: Callable[[], Settings | None] = lambda: None) -> None:
        self._history = history
        self._settings = settings
        self._was, self._set = self._is, settings()

    def check(self) -> None:
        """Raise :class:`Changed` if it may be something else by now."""
        if self._is != self._was:
            raise Changed("something was loaded, or a cell ran on the ranks and may have changed the model.")
        if self._settings() != self._set:
            raise Changed("settings were changed.")

    @property
    def _is(self) -> tuple[int, int]:
        return self._history.loaded_as, self._history.model_version
