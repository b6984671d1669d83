"""Grouping of steps into runs: a log goes on through restarts and resuming, and begins anew with each load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ...report.configurations import Tried
from ...report.evaluation import Evaluation
from ...shared.messages import Sample
from ..history import Entry, Event
from .target import Target


class Run:
    """Sorts what was measured into runs of a target. Used by the log's thread alone.

    Attributes:
        target: what is written to.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._number = 1
        self._workload = ""  # of the run's steps; empty before the first one
        self._step = 0  # the last one
        self._tried: Tried | None = None
        self._loaded_at: int | None = None  # the step from which something goes on that was loaded since the last step

    def write(self, entry: Entry) -> None:
        """Write it, in a new run if it is of one."""
        what, began_s = entry.what, entry.started_s
        if isinstance(what, Tried):
            self._tried = what
            if self._loaded_at is None and self._workload:
                self.target.settings(entry.time_s, self._step, what)
        elif isinstance(what, Event):
            if what.kind == "load":
                self._loaded_at = what.step
            self.target.event(began_s + what.time_s, what)
        elif isinstance(what, Evaluation):
            self._continue(what.step + 1, entry.time_s)
            self.target.evaluation(began_s + what.time_s, what)
        else:
            self._steps(began_s, what)

    def _steps(self, began_s: float, samples: Sequence[Sample]) -> None:
        # A discarded step has the number of the one before it.
        for (step, done), of_step in groupby(sorted(samples, key=_place), key=_place):
            together = list(of_step)
            time_s = began_s + together[0].time_s
            self._continue(step if done else step + 1, time_s)
            self.target.step(time_s, together)
            self._step = max(self._step, step)

    def _continue(self, step: int, time_s: float) -> None:
        """A step is about to be written, which may be the first of something else."""
        workload = self._tried.workload if self._tried else self._workload
        if self._workload and self._loaded_at is None:
            return
        if self._workload and (workload != self._workload or self._loaded_at == 0):
            self._number += 1
            self.target.new_run(self._number)
        self.target.go_on_from(step)
        self._workload, self._loaded_at, self._step = workload, None, step - 1
        if self._tried:
            self.target.settings(time_s, step - 1, self._tried)


def _place(sample: Sample) -> tuple[int, bool]:
    return sample.step, sample.done
