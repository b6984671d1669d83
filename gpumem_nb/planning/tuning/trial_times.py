"""Estimates of the time to measure settings, from the times of others."""

from __future__ import annotations

import statistics

from ...shared.settings import Settings

_STEPS = 2  # of a turn where steps take long: one warms up, one is timed


class TrialTimes:
    """The times of small steps and of turns of whole steps, measured by the kernel that waits for them.

    Attributes:
        longest_s: of a single one.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._small_s = 0.0
        self._turns_s: dict[Settings, float] = {}  # the latest of each: a first one may compile
        self._sample_s: dict[Settings, float] = {}  # for a sample on one rank

    def small_steps(self, seconds: float) -> None:
        """Small steps took so long."""
        self._small_s = seconds
        self.longest_s = max(self.longest_s, seconds)

    def first_step(self, seconds: float) -> None:
        """The first step in a precision took so long, which says nothing of others."""
        self.longest_s = max(self.longest_s, seconds)

    def turn(self, settings: Settings, seconds: float, step_s: float | None) -> None:
        """A turn took so long, and one of its steps ``step_s``; ``None`` where it was not possible."""
        self._turns_s[settings] = seconds
        self.longest_s = max(self.longest_s, seconds)
        if step_s is not None:
            self._sample_s[settings] = step_s / settings.samples_per_rank

    def ahead_s(self, settings: Settings, known: bool) -> float:
        """Seconds until they are measured, small steps before included unless it is ``known`` whether they fit."""
        small_s = 0.0 if known else self._small_s
        if settings in self._turns_s:
            return small_s + self._turns_s[settings]
        # A turn has some steps at least, and short ones until it is long enough to be timed.
        each_s = statistics.median(self._sample_s.values()) if self._sample_s else 0.0
        return small_s + max(_STEPS * each_s * _timed(settings), max(self._turns_s.values(), default=0.0))


def _timed(settings: Settings) -> int:
    """Samples on one rank of what is timed in place of a step: of many micro-batches two, and one."""
    count = settings.accumulation_steps
    samples: int = settings.batch_size * (count if count <= 2 else 3)
    return samples
