"""Training: keeps the ranks busy in the background, and does what is asked of it between two chunks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ...cluster.calls import Call
from ...cluster.interrupts import shielded
from ...cluster.ranks import IN_PASSING_S, Posted, Ranks
from ...report.differences import arrows
from ...report.run_summary import Evaluation, Run
from ...shared.answers import Progress
from ...shared.errors import ClusterDied, GpumemError, TrainingFailed
from ...shared.forecast import Forecasts
from ...shared.messages import Chunk, ChunkReply, Sample
from ...shared.settings import Settings
from ...shared.units import name_ranks
from ...shared.workload import WorkloadInfo
from .. import compatibility
from ..history import History
from ..policy import Policy
from ..snapshot_plan import SnapshotPlan
from .autotune import Autotune
from .chunks import Chunks, ForegroundRequests, InFlight, Pace
from .failures import Failures
from .stalls import Stalls, came_apart, cause_of
from .state import DeviceReadings, News, TrainingState, wait

PAUSE_TIMEOUT_S = 0.4  # for the step under way, before an interrupt discards it
IDLE_READING_S = 1.0
BUSY_LOOK_S = 0.5


class Training:
    """Keeps the ranks training. What moves it on is :meth:`turn`, which :meth:`start` repeats on a thread of its own.

    Attributes:
        requests: what the notebook asks for and waits for meanwhile.

    Args:
        policy: what the session does by itself, as it is now.
        autotuned: called when autotune has ended.
        lost: called with a sentence when the cluster is gone.
    """

    def __init__(
        self,
        ranks: Ranks,
        history: History,
        snapshots: SnapshotPlan,
        policy: Callable[[], Policy],
        autotuned: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self._ranks = ranks
        self._history = history
        self._snapshots = snapshots
        self._lost = lost
        self._state = TrainingState(history)
        self.loads = self._state.loads
        self._in_flight = InFlight(ranks, self._state.wakeup.notify)
        self._pace = Pace()
        self._stalls = Stalls(ranks, history, self._state, lambda: policy().stall_limit_s)
        self._chunks = Chunks(self._state, self._in_flight, history, snapshots, policy)
        self._autotune = Autotune(history, self._state, self._chunks, policy, autotuned)
        self._failures = Failures(history, self._state, policy, self._chunks.send, self._chunks.send_trial)
        self._readings = DeviceReadings(ranks, history)
        self.requests = ForegroundRequests(
            ranks, history, self._state, self._chunks, self._stalls, self._check_not_stuck, self._wait_for
        )
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="gpumem_nb training", daemon=True)

    def start(self) -> None:
        """Begin to keep the ranks busy."""
        self._thread.start()

    # How it stands ----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """Return what the next chunk will run under."""
        return self._state.settings

    @property
    def workload(self) -> WorkloadInfo | None:
        """Return what is loaded."""
        return self._state.workload

    @property
    def busy(self) -> bool:
        """Return whether steps are wanted or under way."""
        return bool(self.playing or len(self._in_flight) or self._failures.trying_out or self._in_flight.leftover)

    @property
    def playing(self) -> bool:
        """Return whether training goes on until it is paused."""
        return self._state.wanted_steps > 0

    @property
    def plays_on(self) -> bool:
        """Return whether it does so without a number of steps to reach."""
        return self._state.wanted_steps == math.inf

    def waiting_for(self) -> list[int]:
        """Return the ranks that have not answered the oldest chunk."""
        return calls[0].pending() if (calls := self.under_way()) else []

    def under_way(self) -> list[Call]:
        """Return the chunks that ranks were sent and have not answered, oldest first."""
        with self._state.locked():
            return self._in_flight.calls

    def stopped_for(self) -> GpumemError | None:
        """Return why training stopped by itself, if no step that was discarded is to blame."""
        return self._state.stopped_for

    def describe(self) -> str:
        """Return what is happening, in words."""
        if failure := self._state.failure:
            return str(failure).splitlines()[0]
        if len(self._in_flight) and not self.playing:
            return f"finishing the steps under way on {name_ranks(self.waiting_for() or range(self._ranks.size))}"
        if self.playing:
            return f"training, step {self._history.steps}{self._autotune}"
        return f"paused at step {self._history.steps}" if self.workload else "no workload loaded"

    # What is asked of it ----------------------------------------------------------------------------------------

    def begin(self, workload: WorkloadInfo, settings: Settings) -> None:
        """A workload was loaded; train it under these settings from now on."""
        with self._state.locked():
            self._state.begin(workload, settings)

    def unload(self) -> None:
        """Forget the workload."""
        with self._state.locked():
            self._state.workload = None

    def set(self, knobs: Mapping[str, Any], check: Callable[[Settings], None] = lambda settings: None) -> None:
        """Change some knobs from the next chunk on; while nothing trains, apply them now.

        Args:
            knobs: new values by name; all others stay as they are at this moment.
            check: raises for settings that do not go with what is loaded.
        """
        with self._state.locked():
            before = self._state.settings
            settings = compatibility.asked(before, knobs, self._ranks.size)
            check(settings)
            if not settings.changed_from(before):
                return
            self._state.adopt(settings)
            self._snapshots.flip()
            if self._state.workload:
                self._history.mark("flip", arrows(before, settings))
        self.apply()

    def apply(self) -> None:
        """While nothing trains, let the ranks switch to the settings now, and raise if they cannot."""
        if not self.busy:
            self._ranks.rejoin(IN_PASSING_S)
        applying = None
        with self._state.locked():
            if self._state.workload is not None and not self.busy:
                self._state.failure = None
                applying = self._chunks.send(0)
        self._state.wakeup.notify()
        self.make_way()
        if applying:  # only this is waited for: another thread may train meanwhile
            self._wait_until(lambda: not self._under_way(applying) or bool(self._stalls.stuck))
            self._state.raise_failure()

    def _check_not_stuck(self) -> None:
        if self._stalls.stuck and self.waiting_for():
            raise TrainingFailed(self._stalls.stuck)

    def _wait_for(self, call: Call, meanwhile: Callable[[], None]) -> None:
        """Wait for a chunk, or until it is told why it may never be answered."""

        def over() -> bool:
            meanwhile()
            return not self._under_way(call) or self._stalls.told

        self.make_way()
        self._wait_until(over)

    def _under_way(self, call: Call) -> bool:
        """Return whether a chunk is not taken in yet, or what would have fit in its place is still being tried out."""
        with self._state.locked():
            return self._in_flight.holds(call) or self._failures.trying_out

    def play(self, steps: float = math.inf) -> None:
        """Train for some steps or until :meth:`pause`; raises ``TrainingFailed`` if a rank is stuck since a stall."""
        with self._state.locked():
            self._check_not_stuck()
            self._state.failure = None
            self._state.wanted_steps = steps
        self._state.wakeup.notify()

    def pause(self, timeout: float | None = None) -> bool:
        """Stop after the chunks under way; says whether they ended in time."""
        with self._state.locked():
            self._state.stop()
        self.make_way()
        return self._wait_until(lambda: not self.busy or bool(self._stalls.stuck), timeout)

    def make_way(self) -> None:
        """Let the ranks end the chunks under way at the next step, because something else waits for them."""
        with shielded():  # an interrupt after the note that they were nudged would come before the nudge
            with self._state.locked():
                due = self._in_flight.nudge_due()
            if due:
                self._ranks.nudge()

    def ask_alone(self, posted: Posted, function: str, *arguments: Any) -> Call:
        """Ask the ranks something, tell ``posted`` of it, and send no chunk until all have answered."""
        self._ranks.rejoin(IN_PASSING_S)
        with self._state.locked():
            return self._in_flight.ask_alone(posted, function, *arguments)

    def train(self, steps: int, progress: Progress = lambda what, done: None) -> Run:
        """Train that many steps and wait for them. An interrupt pauses and returns what was done by then.

        Raises:
            TrainingFailed: training stopped by itself.
        """
        try:
            self._state.start_recording()
            if self.busy:  # steps under way are none of these
                self.pause()
                self._state.start_recording()

            def ended(began: int = self._history.steps) -> bool:
                progress(self._looking() or self._state.recorded_so_far(), (self._history.steps - began) / steps)
                # After a stall some rank may be busy for long with what the others were freed from.
                return not self.busy or (self._stalls.told and self._state.failure is not None)

            self.play(steps)
            self._wait_until(ended)
        except KeyboardInterrupt:
            if not self.pause(timeout=PAUSE_TIMEOUT_S) and not self.interrupt():
                raise
            with self._state.locked():
                self._state.note("Interrupted.")
        except Exception:  # of ``progress``: these steps are not waited for any more
            self.pause(timeout=PAUSE_TIMEOUT_S)
            raise
        finally:
            samples, notes, evaluations = self._state.end_recording()
        self._state.raise_failure()
        return Run(samples, dict(self._state.known_settings), notes, evaluations)

    def _looking(self) -> str:
        rescue = self._history.rescue
        return "memory ran out: what would have fit is being tried out" if rescue and rescue.looking else ""

    def interrupt(self) -> bool:
        """Stop training and interrupt the ranks; a step under way is discarded. Says whether they stopped in time."""
        self.pause(timeout=0)
        return self._ranks.interrupt_until(self.pause)

    def give_up(self, error: GpumemError) -> None:
        """Training cannot go on, for this reason; it may be that the cluster is gone."""
        with self._state.locked():
            if self._closing:
                return
            self._closing = isinstance(error, ClusterDied)
            self._stalls.told = self._in_flight.give_up(forget=self._closing)  # calls that wait for steps are told now
            self._snapshots.order_ended()
            self._failures.end_tryout()
            self._state.stop(error)
            if not self._closing:
                self._state.adopt(self._state.settings)
        self._state.wakeup.notify()
        if isinstance(error, ClusterDied):
            self._lost(error.cause)
        self._history.mark("error", str(error))

    def close(self) -> None:
        """Send nothing any more and end the thread."""
        with self._state.locked():
            self._closing = True
            self._state.stop()
        self._state.wakeup.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _work(self) -> None:
        with self._state.wakeup.listening() as news:
            while not self._closing:
                try:
                    self.turn(news)
                except GpumemError as error:
                    self.give_up(error)
                except Exception as error:  # no call shall wait for a thread that is gone
                    self.give_up(TrainingFailed(f"Training stopped, by a mistake in gpumem_nb itself: {error!r}."))

    def turn(self, news: News) -> None:
        """Send what is due, wait a moment for news, and take in what has come."""
        self._send_due()
        with self._state.locked():
            call = self._in_flight.oldest
        if call is None or call.pending():
            wait(news, BUSY_LOOK_S if call else IDLE_READING_S)
        self._readings.hear()
        with self._state.locked():
            answered = self._in_flight.answered()
            unanswered = self._in_flight.oldest
            if unanswered is None:
                self._stalls.all_answered()
        if answered and answered[0].trial:
            self._learn(*answered)
        elif answered:
            self._receive(*answered)
        elif unanswered:
            self._stalls.look_after(unanswered)
        elif not self.busy and not self._closing:
            with suppress(TrainingFailed):  # the request that needs them says that they cannot be joined
                self._readings.ask()

    def _send_due(self) -> None:
        """Joining the ranks again may take long, so it comes first and without the lock."""
        with self._state.locked():
            due = self._due_steps() > 0
        if not due or not self._ranks.rejoin():
            return
        with self._state.locked():
            while (steps := self._due_steps()) > 0:
                self._stalls.told = False
                most = min(steps, self._chunks.steps_to_snapshot)
                if not self._autotune.send(most):
                    self._chunks.send(int(min(most, self._pace.steps(self._state.settings_id))))

    def _due_steps(self) -> float:
        """Steps that are wanted and not under way, if a chunk may be sent now. Under the lock."""
        free = self._in_flight.free(1 if self._autotune.on else self._pace.most_in_flight(self._state.settings_id))
        waits = self._failures.trying_out or self._state.loading
        return self._state.wanted_steps - self._in_flight.steps if free and not waits else 0

    def _receive(self, chunk: Chunk, replies: list[ChunkReply]) -> None:
        """Take in what the ranks did with a chunk."""
        samples = [sample for reply in replies for sample in reply.samples]
        done = [sample for sample in samples if sample.done]
        failure = cause_of(replies)
        self._history.add(samples, [reply.reading for reply in replies], [reply.device_use for reply in replies])
        if evaluation := Evaluation.of_ranks(replies):
            self._history.evaluated(evaluation)
        news = [*self._history.noted(replies), *self._history.leaked([leak for r in replies for leak in r.leaks])]
        with self._state.locked():
            call = self._in_flight.take()
            self._stalls.all_answered()
            self._snapshots.received(max(sum(s.step_s for s in reply.samples) for reply in replies), replies)
            self._state.record(samples)
            self._state.note(*news, *([evaluation] if evaluation else []))
            if not chunk.tried and (not failure or failure.phase == "evaluation"):
                self._state.applied = chunk.settings
            if done:
                self._count(chunk, done)
            elif not (samples or failure):
                self._in_flight.left_before_it_began(chunk)
            not_possible = self._autotune.learn(chunk, done, failure)
            if came_apart(replies):
                self._stalled(chunk, call)
            elif failure and not not_possible:
                self._failures.handle(failure, chunk, apart=bool(call.apart()))
            elif done and not chunk.tried:
                self._failures.worked(chunk, done)
        self._state.wakeup.notify()

    def _count(self, chunk: Chunk, done: list[Sample]) -> None:
        if not chunk.tried:
            self._state.proven = chunk.settings
        if chunk.settings_id == self._state.settings_id:
            last = max(sample.step for sample in done)
            self._pace.learn(chunk, max(sample.step_s for sample in done if sample.step == last))
        self._state.wanted_steps = max(0, self._state.wanted_steps - len({sample.step for sample in done}))

    def _stalled(self, chunk: Chunk, call: Call) -> None:
        if not self._stalls.told:
            self._stalls.tell(call)
        if chunk.settings_id == self._state.settings_id:
            self._state.adopt(self._state.settings)

    def _learn(self, chunk: Chunk, replies: list[Forecasts]) -> None:
        """Take in what came of a trial."""
        with self._state.locked():
            call = self._in_flight.take()
            self._stalls.all_answered()
            if came_apart(replies) and not self._stalls.told:
                self._stalls.tell(call)
            self._failures.learn(chunk, replies)
        self._state.wakeup.notify()

    def _wait_until(self, true: Callable[[], bool], timeout: float | None = None) -> bool:
        return self._state.wakeup.wait_until(lambda: true() or self._closing, timeout) and true()
