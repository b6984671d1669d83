"""Checks of long questions between trials: is the model still the same, and which precisions are too slow?"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..planning.prediction import DOES_NOT_FIT
from ..shared.settings import Settings
from .history import History
from .predicting import Predicting

_SAMPLES = 4  # of the first step: one in what a device does not compute in takes very long
_TIMES, _LEAST_S = 4, 1.0  # as long as in another precision, and so long at least


class Changed(Exception):
    """The model may have changed while a question looked at it."""


class Unchanged:
    """The model, and if asked for the settings, at the moment when this was made."""

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


class SlowPrecisions:
    """Those that were tried so far; some devices have no fast fp16, say.

    Args:
        predicting: takes the steps.
        present: settings that the steps are like, in everything that is not asked about.
        batched: whether the data bring micro-batches of their own.
        budget_bytes: a limit of each rank besides its own.
    """

    def __init__(
        self, predicting: Predicting, present: Settings, batched: bool, budget_bytes: int | None = None
    ) -> None:
        self._predicting = predicting
        self._size = present.batch_size if batched else min(_SAMPLES, present.batch_size)  # the same in all
        self._budget_bytes = budget_bytes
        self._first_s: dict[str, float] = {}  # by precision
        self._why: dict[str, str] = {}

    def why(self, settings: Settings, again: Callable[[float], bool] = lambda took_s: True) -> str:
        """Return why the precision of these settings is not worth larger steps; empty if it is.

        Args:
            settings: those to try it with.
            again: told what a step took that was slow; says whether another one may be taken, because something may
                have come in between.

        Raises:
            WorkloadError: the step failed for another reason than memory.
        """
        precision = settings.precision
        if precision not in self._first_s:
            few, first_s = settings.replace(batch_size=self._size, accumulation_steps=1), math.inf
            for _ in range(2):
                step = self._predicting.by_small_steps(few, [self._size], self._budget_bytes)[0]
                if step.verdict == DOES_NOT_FIT:  # it may have ended before it took any time
                    return ""
                first_s = min(first_s, step.seconds)
                times = first_s / min([first_s, *self._first_s.values()])
                slow = times > _TIMES and step.seconds > _LEAST_S
                if not slow or not again(step.seconds):
                    break
            self._first_s[precision] = first_s  # not before it is known: a second step may fail
            if slow:
                self._why[precision] = f"a small step took {times:.0f} times as long as in another precision"
        return self._why.get(precision, "")
