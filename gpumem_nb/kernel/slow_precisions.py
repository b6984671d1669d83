"""Tells which precisions take many times as long as another one, by a first small step in each that is undone."""

from __future__ import annotations

from collections.abc import Callable

from ..shared.settings import Settings
from .predicting import Predicting

_SAMPLES = 4  # of the first step: one in what a device does not compute in takes very long
_TIMES, _LEAST_S = 4, 1.0  # as long as in another precision, and so long at least


class SlowPrecisions:
    """Those that were tried so far; some devices have no fast fp16, say.

    Args:
        predicting: takes the steps.
        batched: whether the data bring micro-batches of their own.
        budget_bytes: a limit of each rank besides its own.
    """

    def __init__(self, predicting: Predicting, batched: bool, budget_bytes: int | None = None) -> None:
        self._predicting = predicting
        self._batched = batched
        self._budget_bytes = budget_bytes
        self._first_s: dict[str, float] = {}  # by precision
        self._why: dict[str, str] = {}

    def why(self, settings: Settings, again: Callable[[float], bool] = lambda took_s: True) -> str:
        """Why the precision of these settings is not worth larger steps; empty if it is.

        Args:
            settings: those to try it with.
            again: told what a step took that was slow; says whether another one may be taken, because something may
                have come in between.

        Raises:
            WorkloadError: the step failed for another reason than memory.
        """
        precision, first_s = settings.precision, self._first_s
        if precision not in first_s:
            size = settings.batch_size if self._batched else min(_SAMPLES, settings.batch_size)
            few = settings.replace(batch_size=size, accumulation_steps=1)
            for _ in range(2):
                took_s = self._predicting.by_small_steps(few, [size], self._budget_bytes)[0].seconds
                first_s[precision] = min(took_s, first_s.get(precision, took_s))
                times = first_s[precision] / min(first_s.values())
                if times <= _TIMES or took_s <= _LEAST_S:
                    return ""
                if not again(took_s):
                    break
            self._why[precision] = f"a small step took {times:.0f} times as long as in another precision"
        return self._why.get(precision, "")
