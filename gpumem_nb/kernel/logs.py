"""The logs of a session: each is written by a thread of its own, so that training never waits for a disk."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from queue import Empty, SimpleQueue

from ..report.configurations import Tried
from ..report.run_summary import Evaluation
from ..shared.errors import InvalidInput, nearest
from ..shared.messages import Sample
from ..shared.state_file import as_path
from .history import Entry, Event
from .log_targets import EventFiles, JsonLines, Target, TrackioRun


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


MOST_WAITING = 100_000
"""Samples that may wait for a slow target; a second of training is some hundred of them. What is more is left out."""
CLOSING_S = 10.0  # how long the end of a session, or of the interpreter, waits for a target
_NICENESS = 10  # on the CPU, ranks need the cores more

TARGETS: dict[str, Callable[[str], Target]] = {
    "tensorboard": lambda target: EventFiles(as_path(target)),
    "trackio": TrackioRun,
    "jsonl": lambda target: JsonLines(as_path(target)),
}


def place_of(target: str, to: str) -> str:
    """Return where a log to this target is written, however the target is spelled."""
    if to == "trackio":
        project, _, name = target.partition("/")
        return f"{project}/{name or TrackioRun.NAME}"
    return os.path.realpath(as_path(target))


class Log:
    """One target, and the thread that writes to it.

    Attributes:
        target: as it was named.
        to: which kind, by its name in :data:`TARGETS`.
        place: the same for each spelling of the target.
        problem: why nothing is written any more; empty while it is.

    Args:
        told: called with a sentence when something could not be written.
    """

    def __init__(self, target: str, to: str, told: Callable[[str], None]) -> None:
        self.target = target
        self.to = to
        self.place = place_of(target, to)
        self.problem = ""
        self._told = told
        self._run = Run(TARGETS[to](target))
        self._queue: SimpleQueue[Entry | None] = SimpleQueue()
        self._put = self._taken = self._left_out = 0  # samples; history's lock guards all but those taken
        self._thread = threading.Thread(target=self._work, name=f"gpumem_nb log {to}", daemon=True)

    def start(self) -> None:
        """Write from now on, on a thread of its own."""
        self._thread.start()
        atexit.register(self.stop)

    def take_in(self, entry: Entry) -> None:
        """Write this soon. Waits for nothing."""
        if self.problem:
            return
        if self._put - self._taken > MOST_WAITING:
            self._left_out += entry.weight
            return
        self._put += entry.weight
        self._queue.put(entry)

    def stop(self) -> bool:
        """Write what there is and close the target; says whether that was done in time."""
        atexit.unregister(self.stop)
        self._queue.put(None)
        self._thread.join(CLOSING_S)
        return not self._thread.is_alive()

    def __repr__(self) -> str:
        what = f"steps, settings, evaluations and events go to {self._run.target.about}"
        missing = f"; {self._left_out} samples were left out, because it was too slow" if self._left_out else ""
        return f"{self.problem or what}{missing}"

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            while entry := self._queue.get():
                self._write(entry)
                if self._queue.empty():
                    self._run.target.flush()
            self._run.target.close()
        except Exception as error:  # of a disk, of another package
            self.problem = f"Logging to {self.target} ended ({type(error).__name__}: {error}); training goes on."
            self._told(self.problem)
            with suppress(Empty):
                while True:
                    self._queue.get_nowait()
            with suppress(Exception):
                self._run.target.close()

    def _write(self, entry: Entry) -> None:
        self._run.write(entry)
        self._taken += entry.weight


class Logs:
    """All logs of a session, over restarts of its ranks. Changed by the thread that asks the session."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._all: tuple[Log, ...] = ()

    def __iter__(self) -> Iterator[Log]:
        return iter(self._all)

    @property
    def problems(self) -> list[str]:
        """Return why targets are not written any more."""
        return [log.problem for log in self._all if log.problem]

    def take_in(self, entry: Entry) -> None:
        """Something was measured or has happened."""
        for log in self._all:
            log.take_in(entry)

    def begin(self, target: str, to: str | None, settings: Entry | None) -> Log:
        """Log to a target from now on; ``settings`` are those of the moment.

        Raises:
            InvalidInput: an unknown kind, a target that cannot be written, or one that is written already.
        """
        kind = to or ("jsonl" if target.endswith(".jsonl") else "tensorboard")
        if not isinstance(kind, str) or kind not in TARGETS:
            raise InvalidInput(f"Nothing can be logged to {kind!r}: {nearest(str(kind), TARGETS)}.")
        place = place_of(target, kind)
        if any((log.place, log.to) == (place, kind) and not log.problem for log in self._all):
            raise InvalidInput(f"{target} is logged to already. %hvd_log {target} --stop ends that.")
        log = Log(target, kind, self._told)
        log.start()
        if settings:
            log.take_in(settings)
        self._all = (*(one for one in self._all if not one.problem), log)
        return log

    def stop(self, target: str | None = None) -> list[Log]:
        """End the log to a target, or all of them; returns those that were ended.

        Raises:
            InvalidInput: nothing is logged there.
        """
        ended = [log for log in self._all if target is None or log.place == place_of(target, log.to)]
        if target is not None and not ended:
            raise InvalidInput(f"Nothing is logged to {target}. %hvd_log shows what is logged.")
        self._all = tuple(log for log in self._all if log not in ended)
        for log in ended:
            log.stop()
        return ended
