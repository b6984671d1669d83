"""The logs of a session: each is written by a thread of its own, so that training never waits for a disk."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

from ...shared.errors import InvalidInput, nearest
from ...shared.state_file import as_path
from ..history import Entry
from .event_files import EventFiles
from .json_lines import JsonLines
from .run import Run
from .target import Target
from .trackio_run import TrackioRun

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
    """Return where a log to this target is written, however the target is spelled.

    Raises:
        InvalidInput: not a path.
    """
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
        if kind not in TARGETS:
            raise InvalidInput(f"Nothing can be logged to {kind!r}: {nearest(kind, TARGETS)}.")
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
