"""The state of training: the workload, its settings, how many steps are wanted, and the threads that wait for news."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from ...cluster.calls import Call
from ...cluster.interrupts import shielded
from ...cluster.ranks import Ranks
from ...report.rescue import Rescue
from ...report.run_summary import Evaluation, measured_by
from ...report.speed import STEPS_JUDGED
from ...shared.answers import Pulse
from ...shared.errors import GpumemError, TrainingFailed
from ...shared.messages import Sample
from ...shared.settings import Settings
from ...shared.workload import WorkloadInfo
from ..history import History

News = SimpleQueue[None]
_LONGEST_WAIT_S = 0.5  # in case something changes without a ring


class Wakeup:
    """Any thread may ring at any moment: that takes no lock, so ringing never waits.

    Those who wait listen on queues of their own and not on a condition, whose lock an interrupt could leave broken.
    """

    def __init__(self) -> None:
        self._listeners: list[News] = []

    def notify(self) -> None:
        """There is news."""
        for news in list(self._listeners):
            news.put(None)

    @contextmanager
    def listening(self) -> Iterator[News]:
        """Every ring inside is in the queue, also one that comes while no thread waits."""
        news: News = SimpleQueue()
        try:
            self._listeners.append(news)
            yield news
        finally:
            with suppress(ValueError):
                self._listeners.remove(news)

    def wait_until(self, true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until something is true, looking at each ring; says whether it is, at the latest after ``timeout`` s."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self.listening() as news:
            while not true() and (left := deadline - time.monotonic()) > 0:
                wait(news, min(left, _LONGEST_WAIT_S))
        return true()


def wait(news: News, timeout: float) -> None:
    """Wait for a ring, and take all that there are."""
    with suppress(Empty):
        news.get(timeout=timeout)
        while True:
            news.get_nowait()


class TrainingState:
    """Read by every thread, changed under :meth:`locked` only, which no thread holds while it waits for anything.

    Attributes:
        workload: what is loaded.
        settings, settings_id: what the next chunk runs under.
        applied: the last settings that the ranks could switch to.
        proven: the last settings that a step was finished under.
        wanted_steps: steps still to be done, those under way included.
        loading: whether something else is about to be trained: steps sent now would be of that, and count as of this.
        failure: why training stopped by itself.
        wakeup: notified when something has changed that other threads may wait for.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._lock = threading.RLock()
        self.wakeup = Wakeup()
        self.workload: WorkloadInfo | None = None
        self.settings = Settings()
        self.settings_id = 0
        self.applied = self.settings
        self.proven: Settings | None = None
        self.known_settings: dict[int, Settings] = {}
        self.wanted_steps: float = 0
        self.loading = False
        self.failure: GpumemError | Rescue | None = None
        self._recording: list[Sample] | None = None
        self._latest_recorded: deque[Sample] = deque(maxlen=STEPS_JUDGED * history.size)
        self._recorded_peak = 0
        self._notes: list[Rescue | Evaluation | str] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Change something: takes a moment, in which Ctrl-C is held back."""
        with shielded(), self._lock:
            yield

    def loads(self, under_way: bool) -> None:
        """Let no steps be sent while something else is loaded."""
        with self.locked():
            self.loading = under_way
        self.wakeup.notify()

    def begin(self, workload: WorkloadInfo, settings: Settings) -> None:
        """A workload was loaded; train it under these settings from now on."""
        self.workload = workload
        self.applied, self.proven = settings, None
        self.failure = None
        self.adopt(settings)

    def adopt(self, settings: Settings) -> None:
        """Give settings a new id, even if unchanged: ranks refuse an id under which a step failed."""
        self.settings = settings
        self.settings_id = self.number(settings)
        if rescue := self._history.rescue:
            rescue.now = settings
        if loaded := self.workload:
            about = loaded.options, loaded.parameters, loaded.batch_norm
            self._history.begin(self.settings_id, loaded.name, settings, *about)

    def number(self, settings: Settings) -> int:
        """Return a number of their own for settings, by which samples name them."""
        number = len(self.known_settings) + 1
        self.known_settings[number] = settings
        return number

    def stop(self, failure: GpumemError | Rescue | None = None) -> None:
        """Want no more steps, perhaps for this reason."""
        self.wanted_steps = 0
        self.failure = failure or self.failure

    @property
    def stopped_for(self) -> GpumemError | None:
        """Return why training stopped by itself, if no step that was discarded is to blame."""
        return None if isinstance(self.failure, Rescue) else self.failure

    def raise_failure(self) -> None:
        """Raise what training stopped for, if it did.

        Raises:
            TrainingFailed: that, or whatever else it was.
        """
        if isinstance(self.failure, Rescue):
            raise TrainingFailed(str(self.failure))
        if self.failure:
            raise self.failure

    # What one call of train() gets back -------------------------------------------------------------------------

    def start_recording(self) -> None:
        """Keep samples and notes from now on."""
        with self.locked():
            self._recording, self._notes = [], []
            self._latest_recorded.clear()
            self._recorded_peak = 0

    def record(self, samples: Sequence[Sample]) -> None:
        """Keep samples for the run that is recorded."""
        if self._recording is not None:
            done = [sample for sample in samples if sample.done]
            self._recording.extend(samples)
            self._latest_recorded.extend(sorted(done, key=lambda sample: sample.step))
            self._recorded_peak = max([self._recorded_peak, *(sample.live_peak_bytes for sample in done)])

    def recorded_so_far(self) -> str:
        """Return the latest recorded step and what these steps measured, in a line; empty before there is one."""
        done = list(self._latest_recorded)
        return f"step {done[-1].step}, {measured_by(done, self._recorded_peak)}" if done else ""

    def note(self, *notes: Rescue | Evaluation | str) -> None:
        """Keep what happened for the run that is recorded; it is put into words at the end, when more is known."""
        if self._recording is not None:
            self._notes.extend(notes)

    def end_recording(self) -> tuple[list[Sample], list[str], list[Evaluation]]:
        """Return what was kept, and nothing more from now on."""
        with self.locked():
            samples, kept = self._recording or [], self._notes
            self._recording, self._notes = None, []
            notes = [str(note) for note in kept if not isinstance(note, Evaluation)]
        return samples, notes, [note for note in kept if isinstance(note, Evaluation)]


class DeviceReadings:
    """Keeps the history's readings up to date. Used by the training thread alone."""

    def __init__(self, ranks: Ranks, history: History) -> None:
        self._ranks = ranks
        self._history = history
        self._asked: Call | None = None
        self._heard: dict[int, Pulse] = {}

    def hear(self) -> None:
        """Readings come with the pulses of ranks that are busy for long."""
        pulses = self._ranks.pulses()
        if pulses and pulses != self._heard:
            self._heard = pulses
            readings, uses = list(self._history.readings), list(self._history.device_uses)
            for rank, pulse in pulses.items():
                readings[rank], uses[rank] = pulse.reading, pulse.device_use
            self._history.read(readings, uses)

    def ask(self) -> None:
        """Keep readings coming while cells run and nothing trains; at most one question is under way."""
        if self._asked is None:
            self._asked = self._ranks.call("look")
        elif not self._asked.pending():
            finished, self._asked = self._asked, None
            self._history.read(*zip(*finished.get(), strict=True))
