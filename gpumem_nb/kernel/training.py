"""Driving the ranks: two chunks always in flight, settings that change between them, failures that are survived."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from ..cluster.calls import Call
from ..cluster.ranks import Ranks
from ..cluster.shield import shielded
from ..report import waits
from ..report.differences import arrows, typed
from ..report.rescue import Rescue
from ..shared.errors import ClusterDied, GpumemError, TrainingFailed
from ..shared.knobs.batch import shrunk
from ..shared.messages import Chunk, ChunkReply, Failure, Pulse, Sample, WorkloadInfo
from ..shared.ranklist import name_ranks
from ..shared.settings import Settings
from .history import History, Run
from .policy import Policy
from .snapshot_plan import SnapshotPlan
from .tryout import Tryout

CHUNK_SECONDS = 1.0
CHUNKS_IN_FLIGHT = 2
LARGEST_CHUNK = 1000
LATE_PATIENCE_S = 4.0  # a busy machine may take long over the end of a cell and what comes next
PAUSE_PATIENCE_S = 0.4  # for the step under way, before an interrupt discards it
TRIAL_ID = -2  # and below: trials are no configurations of their own
IDLE_READING_SECONDS = 1.0


class Training:
    """Keeps the ranks training in the background, on a thread of its own.

    ``lost`` is called with a sentence when the cluster is gone.

    Attributes:
        policy: what to do when memory runs out.
    """

    def __init__(self, ranks: Ranks, history: History, snapshots: SnapshotPlan, lost: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._history = history
        self._snapshots = snapshots
        self._lost = lost
        self.policy = Policy()
        self._changed = threading.Condition()
        self._in_flight: deque[tuple[Chunk, Call]] = deque()
        self._tryout: Tryout | None = None
        self._given_up: list[Call] = []  # chunks that failed on one rank, and may be under way on others
        self._idle_reading: Call | None = None
        self._wanted: float = 0  # steps still to be done, those under way included
        self._alone: Call | None = None  # until it is answered no chunk is sent
        self._chunk_steps = 1
        self._nudges = 0
        self._workload: WorkloadInfo | None = None
        self._settings = Settings()
        self._settings_id = 0
        self._applied = Settings()  # the last ones that the ranks could switch to
        self._proven: Settings | None = None  # the last ones that a step was finished under
        self._known_settings: dict[int, Settings] = {}
        self._recording: list[Sample] | None = None
        self._notes: list[Rescue | str] = []
        self._failure: GpumemError | Rescue | None = None
        self._stalled = False  # ranks came apart, and it has been told
        self._stuck = ""  # why a chunk may never be answered
        self._late_s = math.inf  # since when ranks are interrupted that others were freed from
        self._heard: dict[int, Pulse] = {}
        self._closing = False
        self._listeners: list[SimpleQueue[None]] = []
        self._thread = threading.Thread(target=self._work, name="gpumem_nb training", daemon=True)
        self._thread.start()

    @property
    def settings(self) -> Settings:
        """What the next chunk will run under."""
        return self._settings

    @property
    def workload(self) -> WorkloadInfo | None:
        """What is loaded."""
        return self._workload

    @property
    def busy(self) -> bool:
        """Whether steps are wanted or under way."""
        return self._wanted > 0 or bool(self._in_flight or self._tryout) or self._leftover() is not None

    @property
    def playing(self) -> bool:
        """Whether training goes on until it is paused."""
        return self._wanted > 0

    def waiting_for(self) -> list[int]:
        """The ranks that have not answered the oldest chunk."""
        with self._locked():
            call = self._leftover() or (self._in_flight[0][1] if self._in_flight else None)
            return call.pending() if call else []

    def begin(self, workload: WorkloadInfo, settings: Settings) -> None:
        """A workload was loaded; train it under these settings from now on."""
        with self._locked():
            self._workload = workload
            self._applied, self._proven = settings, None
            self._failure = None
            self._adopt(settings)

    def unload(self) -> None:
        """There is no workload any more."""
        with self._locked():
            self._workload = None

    def set(self, settings: Settings) -> None:
        """Change the settings from the next chunk on. While nothing trains, apply them now and raise if that fails."""
        with self._locked():
            if not settings.changed_from(self._settings):
                return
            before = self._settings
            self._adopt(settings)
            self._snapshots.flip()
            if self._workload:
                self._history.mark("flip", arrows(before, settings))
        self.apply()

    def apply(self) -> None:
        """While nothing trains, let the ranks switch to the settings now, and raise if they cannot."""
        with self._locked():
            apply_now = self._workload is not None and not self.busy
            if apply_now:
                self._failure = None
                self._send(0)
        self.make_way()
        if apply_now:
            self._wait_until(lambda: not self.busy)
            self._raise_failure()

    def play(self, steps: float = math.inf) -> None:
        """Train in the background, for some steps or until :meth:`pause`."""
        with self._locked():
            if self._stuck and self.waiting_for():
                raise TrainingFailed(self._stuck)
            self._failure = None
            self._wanted = steps
            self._announce()

    def pause(self, timeout: float | None = None) -> bool:
        """Stop after the chunks under way; says whether they ended in time."""
        with self._locked():
            self._wanted = 0
        self.make_way()
        return self._wait_until(lambda: not self.busy or bool(self._stuck), timeout)

    def make_way(self) -> None:
        """Let the ranks end the chunks under way at the next step, because something else waits for them."""
        with self._locked():
            if not any(chunk.steps > 1 and chunk.nudges == self._nudges for chunk, _ in self._in_flight):
                return
            self._nudges += 1
        self._ranks.nudge()

    def ask_alone(self, function: str, *arguments: Any) -> Call:
        """Ask the ranks something, and send no chunk until all have answered.

        Ranks that went on training would wait in the next reduction for one that takes long to answer.
        """
        with self._locked():
            self._alone = self._ranks.call(function, *arguments)
            self._alone.when_done(self._announce)
            return self._alone

    def train(self, steps: int) -> Run:
        """Train that many steps and wait for them. An interrupt pauses and returns what was done by then."""
        with self._locked():
            self._recording, self._notes = [], []
        try:
            self.play(steps)
            # After a stall some rank may be busy for long with what the others were freed from.
            self._wait_until(lambda: not self.busy or (self._stalled and self._failure is not None))
        except KeyboardInterrupt:
            if not self.pause(timeout=PAUSE_PATIENCE_S) and not self.interrupt():
                raise
            self._notes.append("Interrupted.")
        finally:
            with self._locked():
                samples, self._recording = self._recording or [], None
        self._raise_failure()
        return Run(samples, dict(self._known_settings), [str(note) for note in self._notes])

    def interrupt(self) -> bool:
        """Stop training and interrupt what the ranks are doing; a step under way is discarded.

        Says whether they stopped in time.
        """
        self.pause(timeout=0)
        return self._ranks.interrupt_until(self.pause)

    def close(self) -> None:
        """Send nothing any more and end the thread."""
        with self._locked():
            self._closing = True
            self._wanted = 0
            self._announce()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _wait_until(self, true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait on a queue of its own, not on the condition, whose lock an interrupt could leave broken."""
        news: SimpleQueue[None] = SimpleQueue()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._listeners.append(news)
        try:
            while not true() and not self._closing and (left := deadline - time.monotonic()) > 0:
                with suppress(Empty):
                    news.get(timeout=min(left, 0.5))
            return true()
        finally:
            self._listeners.remove(news)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with shielded(), self._changed:
            yield

    def _announce(self) -> None:
        with self._locked():
            self._changed.notify_all()
        for news in list(self._listeners):
            news.put(None)

    def _raise_failure(self) -> None:
        if isinstance(self._failure, Rescue):
            raise TrainingFailed(str(self._failure))
        if self._failure:
            raise self._failure

    def _adopt(self, settings: Settings) -> None:
        self._settings = settings
        self._settings_id += 1
        self._known_settings[self._settings_id] = settings
        self._chunk_steps = 1
        if self._workload:
            self._history.begin(self._settings_id, self._workload.name, settings)

    def _send(self, steps: int) -> None:
        snapshot = self._snapshots.order(self._history.steps + self._steps_under_way())
        every = 0 if self.policy.ledger_steps == "never" else int(self.policy.ledger_steps)
        chunk = Chunk(self._settings, self._settings_id, steps, self._nudges, snapshot, ledger_steps=every)
        self._dispatch(chunk)

    def _dispatch(self, chunk: Chunk) -> None:
        call = self._ranks.call("run_chunk", chunk)
        call.when_done(self._announce)
        self._in_flight.append((chunk, call))
        self._announce()

    def _work(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except GpumemError as error:
                self.give_up(error)
            except Exception as error:  # nobody shall wait for a thread that is gone
                self.give_up(TrainingFailed(f"Training stopped, by a mistake in gpumem_nb itself: {error!r}."))

    def _turn(self) -> None:
        with self._locked():
            while self._may_send() and (unsent := self._unsent_steps()) > 0:
                if not self._ranks.rejoin():
                    break
                self._stalled = False
                self._send(int(min(self._chunk_steps, unsent, self._steps_to_snapshot())))
            if not self._in_flight:
                self._changed.wait(IDLE_READING_SECONDS)
            elif self._in_flight[0][1].pending():
                self._changed.wait(0.5)
            answered = self._answered()
            leftover = self._leftover()
            idle = not self.busy and not self._closing
        self._hear()
        if answered and answered[0].trial:
            self._learn(*answered)
        elif answered:
            self._receive(*answered)
        elif leftover:
            self._look_after(leftover)
        elif self._in_flight:
            self._look_after(self._in_flight[0][1])
        elif idle:
            self._read_devices()

    def _may_send(self) -> bool:
        ready = self._leftover() is None and not (self._alone and self._alone.pending()) and not self._tryout
        return ready and len(self._in_flight) < CHUNKS_IN_FLIGHT

    def _leftover(self) -> Call | None:
        """A chunk given up on that some rank has yet to answer: its reductions would meet those of another chunk."""
        return next((call for call in self._given_up if call.pending()), None)

    def _steps_to_snapshot(self) -> float:
        return self._snapshots.steps_left(self._history.steps + self._steps_under_way())

    def _hear(self) -> None:
        """Readings come with the pulses of ranks that are busy for long."""
        pulses = self._ranks.pulses()
        if pulses and pulses != self._heard:
            self._heard = pulses
            readings, uses = list(self._history.readings), list(self._history.device_uses)
            for rank, pulse in pulses.items():
                readings[rank], uses[rank] = pulse.reading, pulse.device_use
            self._history.read(readings, uses)

    def _look_after(self, call: Call) -> None:
        """Interrupt ranks whose step the others have been freed from; one that is out of reach is named."""
        if self._wait_report(call):
            if not self._stalled:
                call.finished(0.5)  # ranks that waited together are freed together
                self._tell_stall(call)
            # A cell from before, with which a rank is still busy, is not the step's business to end.
            begun, elsewhere = call.pulses(), self._ranks.pulses()
            late = [rank for rank in call.pending() if rank in begun or rank not in elsewhere]
            if not late:
                self._late_s = math.inf
            elif not self._stuck:
                self._late_s = min(self._late_s, time.monotonic())
                self._ranks.interrupt_until(call.finished, late)
                left = [rank for rank in late if rank in call.pending()]
                if left and time.monotonic() - self._late_s > LATE_PATIENCE_S:
                    self._strand(f"{name_ranks(left)} could not be interrupted")
        elif not self._stuck and waits.out_of_reach(call.pulses(), self._ranks.stall_limit_s):
            wait_report = waits.now(self._ranks.pulses(), self._ranks.pending(), self._ranks.size)
            self._strand(f"{wait_report}, and could not be freed")

    def _wait_report(self, call: Call) -> waits.WaitReport | None:
        """Who waited for whom when the ranks came apart in this chunk, if they did."""
        apart = call.apart()
        return waits.ended(apart, self._ranks.pulses(), call.pending(), self._ranks.size) if apart else None

    def _tell_stall(self, call: Call) -> None:
        """Pause and say who waited for whom: the settings are not to blame."""
        wait_report = self._wait_report(call)
        why = (
            f"{wait_report} (stall_limit_s={self._ranks.stall_limit_s:g})"
            if wait_report
            else "Horovod was shut down while ranks trained, by a cell or by the model's own code"
        )
        with self._locked():
            self._stalled = True
            self._wanted = 0
            self._failure = TrainingFailed(
                f"{why}.\nThe step was discarded on all ranks, which join again by themselves, and training paused. "
                "Mend the cause, then go on with %hvd_play."
            )
            self._announce()
        self._history.mark("stall", why)

    def _strand(self, why: str) -> None:
        """A chunk may never be answered: nobody shall wait for it."""
        with self._locked():
            self._stalled = True
            self._stuck = f"{why}. Start the ranks again with %hvd_restart."
            self._wanted = 0
            before = f"{self._failure}\n" if self._failure else ""
            self._failure = TrainingFailed(f"{before}{self._stuck}")
            self._announce()
        self._history.mark("stall", why)

    def _unsent_steps(self) -> float:
        return self._wanted - self._steps_under_way()

    def _steps_under_way(self) -> int:
        return sum(chunk.steps for chunk, _ in self._in_flight)

    def _answered(self) -> tuple[Chunk, list[ChunkReply]] | None:
        if not self._in_flight:
            return None
        chunk, call = self._in_flight[0]
        if error := call.first_error():
            raise error if isinstance(error, GpumemError) else ClusterDied(str(error))
        return None if call.pending() else (chunk, call.get())

    def _taken(self) -> Call:
        """The oldest chunk, which all ranks have answered, is under way no more."""
        self._stuck, self._late_s = "", math.inf
        return self._in_flight.popleft()[1]

    def _receive(self, chunk: Chunk, replies: list[ChunkReply]) -> None:
        samples = [sample for reply in replies for sample in reply.samples]
        self._history.add(samples, [reply.reading for reply in replies], [reply.device_use for reply in replies])
        done = [sample for sample in samples if sample.event in ("", "flip")]
        failure = next((reply.failure for reply in replies if reply.failure), None)
        leaks = self._history.leaked([leak for reply in replies for leak in reply.leaks])
        with self._locked():
            self._notes += leaks
            call = self._taken()
            self._snapshots.received(max(sum(s.step_s for s in reply.samples) for reply in replies), replies)
            if self._recording is not None:
                self._recording.extend(samples)
            if not failure:
                self._applied = chunk.settings
            if done:
                self._proven = chunk.settings
                slowest = max(sample.step_s for sample in done[-len(replies) :])
                if chunk.settings_id == self._settings_id:
                    # Short after a flip, when people look closely, then longer, which costs less.
                    self._chunk_steps = max(1, min(2 * chunk.steps, LARGEST_CHUNK, int(CHUNK_SECONDS / slowest)))
            self._wanted = max(0, self._wanted - len({sample.step for sample in done}))
            if _came_apart(replies):
                if not self._stalled:
                    self._tell_stall(call)
                if chunk.settings_id == self._settings_id:
                    self._adopt(self._settings)  # the ranks hold the old number for broken
            elif failure:
                self._handle(failure, chunk)
            elif done and self._history.rescue:
                self._history.rescue.worked(chunk.settings, max(sample.live_peak_bytes for sample in done))
            self._announce()

    def _handle(self, failure: Failure, chunk: Chunk) -> None:
        """Go on with other settings, as the policy says; without any, or when they are not to blame, stop."""
        newer = chunk.settings_id != self._settings_id
        if failure.kind == "interrupted":
            self._wanted = 0
            if not newer:
                self._adopt(self._settings)  # the ranks hold the old number for broken
            return
        tried = self._history.configuration(chunk.settings_id)
        if tried:
            tried.outcome = failure.kind
        rescue = Rescue(failure, self._history.steps + 1, chunk.settings)
        self._history.rescued(rescue)
        self._notes.append(rescue)
        other = None if newer else self._way_out(failure, chunk.settings)
        shrinks = other is not None and self.policy.on_oom == "shrink" and other == shrunk(chunk.settings)
        if failure.kind == "oom" and not shrinks:
            self._try_out(rescue)
        if other:
            rescue.goes_on = other if shrinks else None
            rescue.did = f"training {'goes on with' if shrinks else 'went back to'} {typed(chunk.settings, other)}"
            self._adopt(other)
            self._history.mark("note", rescue.did.removeprefix("training "))
        if failure.kind == "error" or not (other or newer):
            self._wanted = 0
            self._failure = rescue
            rescue.did = rescue.did or "training stopped"
        if other and not self._wanted:
            self._send(0)
        elif not other and not newer:
            # The ranks hold these settings for broken; the next attempt gets a new number.
            self._adopt(self._settings)

    def _way_out(self, failure: Failure, failed: Settings) -> Settings | None:
        """Settings to go on with, or to go back to before stopping."""
        if failure.kind == "oom" and self.policy.on_oom == "stop":
            return None
        if failure.kind == "oom" and self.policy.on_oom == "shrink" and failure.phase not in ("settings", "update"):
            return shrunk(failed)
        works = self._applied if failure.phase == "settings" else self._proven
        return works if works and failed.changed_from(works) else None

    def _try_out(self, rescue: Rescue) -> None:
        """Find out on the ranks which settings would have fit; what they answer is added to the rescue."""
        latest = [sample for of_rank in self._history.samples(last=2) for sample in of_rank]  # one of them was done
        sample_s = max((1 / sample.samples_per_s for sample in latest), default=0.0)
        blocks = self._workload is not None and self._workload.blocks > 0
        self._tryout = Tryout(rescue, blocks, sample_s)
        self._try_next(TRIAL_ID)

    def _try_next(self, trial_id: int) -> None:
        settings = self._tryout.next() if self._tryout else None
        if settings:
            self._dispatch(Chunk(settings, trial_id, 1, self._nudges, trial=True))
        else:
            self._end_tryout()

    def _end_tryout(self) -> None:
        if self._tryout:
            self._tryout.rescue.looking = False
        self._tryout = None

    def _learn(self, chunk: Chunk, replies: list[ChunkReply]) -> None:
        with self._locked():
            call = self._taken()
            self._snapshots.received(0.0, replies)
            failures = {reply.failure.kind for reply in replies if reply.failure}
            if _came_apart(replies) and not self._stalled:
                self._tell_stall(call)
            if failures & {"stall", "interrupted"}:
                self._end_tryout()
            elif self._tryout:
                self._tryout.learn(failures, [sample for reply in replies for sample in reply.samples])
            self._try_next(chunk.settings_id - 1)
            self._history.tried_out()
            self._announce()

    def give_up(self, error: GpumemError) -> None:
        """Training cannot go on, for this reason; it may be that the cluster is gone."""
        with self._locked():
            if self._closing:
                return
            self._closing = isinstance(error, ClusterDied)
            self._wanted = 0
            if not self._closing:
                self._given_up = [call for _, call in self._in_flight if call.pending()]
                self._stalled = bool(self._given_up)  # as after a stall, whoever waits for steps is told now
                self._adopt(self._settings)  # some ranks may hold the old number for broken
            self._in_flight.clear()
            self._end_tryout()
            self._failure = error
            self._announce()
        if isinstance(error, ClusterDied):
            self._lost(error.cause)
        self._history.mark("error", str(error))

    def _read_devices(self) -> None:
        """Keep readings coming while cells run and nothing trains; at most one question is under way."""
        if self._idle_reading is None:
            self._idle_reading = self._ranks.call("look")
        elif not self._idle_reading.pending():
            finished, self._idle_reading = self._idle_reading, None
            self._history.read(*zip(*finished.get(), strict=True))

    def describe(self) -> str:
        """What is happening, in words."""
        waiting = self.waiting_for()
        if self._failure:
            return str(self._failure).splitlines()[0]
        if self._in_flight and not self.playing:
            return f"finishing the steps under way on {name_ranks(waiting or range(self._ranks.size))}"
        if self.playing:
            return f"training, step {self._history.steps}"
        if self._workload:
            return f"paused at step {self._history.steps}"
        return "no workload loaded"


def _came_apart(replies: list[ChunkReply]) -> bool:
    return any(reply.failure and reply.failure.kind == "stall" for reply in replies)
