"""The trainer: one workload on one rank, trained chunk by chunk under changing settings."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from ...memory.device import Device, Garbage, leaving_no_cache
from ...memory.leaks.detector import LeakDetector
from ...shared.errors import WorkloadError
from ...shared.messages import Chunk, ChunkReply, Evaluated, Failure, Sample, Timeline
from ...shared.settings import Settings
from ...shared.step_times import StepLanes
from ...shared.workload import Workload, WorkloadInfo
from .. import cells
from ..data.held_out import HeldOut
from ..data.stream import Stream
from ..link import settings as link_settings
from ..link import signals
from ..random_state import OwnNumbers, seeded
from .buckets import ReductionConfig
from .checks import check_groups
from .evaluation import PHASE as EVALUATION
from .evaluation import Evaluator
from .failures import explained
from .gradients import NoiseScale
from .joining import check_alike, make_alike, take_from_first
from .live_model import LiveModel, RatesMemory
from .notes import workload_info
from .optimizer_state import from_first
from .rates import Course
from .samples import Looks, Outcome, begun, completed
from .step import Stepper
from .step_clock import StepTimings
from .trials import NO_CONFIGURATION, Trial, Trials, check_together, room_of_state_that_leaves
from .update_times import UpdateTimes
from .voting import StepOrder

FIRST_LEDGERS = 2  # under new settings: the optimizer's state is there from the second step on


class Trainer:
    """Trains one workload on this rank, in step with the trainers of the other ranks once :meth:`join` was called.

    Attributes:
        workload: what was loaded.
        live: its model and optimizer; cells that run on the rank may look at them.
        stream: its data, at the place where the next step begins.
        steps: optimizer steps done.
        random: the random numbers that steps draw, for dropout say.
        trials: asks what other settings would need.
        evaluator, stepper: look at the validation data (``None`` without any), and take steps.
    """

    def __init__(
        self,
        workload: Workload,
        stream: Stream,
        device: Device,
        started_s: float,
        held_out: HeldOut | None = None,
    ) -> None:
        """Build the workload.

        Args:
            workload: what to train.
            stream: its data, sharded; its seed is also that of the initial weights and of dropout.
            device: of this rank.
            started_s: when the session started, on the clock of ``time.time``; samples count from there.
            held_out: its validation data, if it has any.

        Raises:
            WorkloadError: the workload brings no model that can be trained.
        """
        self.workload, self.stream = workload, stream
        with seeded(stream.seed):
            self.live = LiveModel(workload, device, stream.size)
        self.random = OwnNumbers(stream.seed, stream.rank)
        self.steps = 0
        self._device, self._started_s = device, started_s
        known = {"model": self.live.model, "dataset": stream.dataset, "workload": workload}
        self._leaks = LeakDetector(stream.rank, device.torch_device, known)
        self.stepper = Stepper(self.live, stream, device, self._leaks)
        self.trials, self.update_times = Trials(self, device), UpdateTimes()
        self._cells, self._garbage = cells.ran(), Garbage(device)
        self.evaluator: Evaluator | None = None
        if held_out is not None:
            self.evaluator = Evaluator(self.live, workload, held_out, device, stream.rank, stream.size)
        self._settings_id = self._failed_id = -1  # the latter: under which a step was discarded
        self._proven_id = -1  # under which an update was made
        self._left_after = -1  # as many nudges, ranks left a chunk; those made before that have no steps any more
        self._flipped = False  # since the last step that was finished
        self._recorded_steps = 0  # under these settings
        self._is_first = True  # no step was done
        self._latest: StepTimings | None = None  # of the step that was done last
        self._noise = NoiseScale(stream.size)
        device.reset_peak()  # what was loaded before needed is no figure of this

    def join(self) -> None:
        """Begin with the values of rank 0; all ranks call it together.

        Raises:
            WorkloadError: the ranks hold different models or optimizers; raised on all of them.
        """
        check_alike(self.live)
        take_from_first(self.live)

    def sync(self) -> None:
        """Go on with what rank 0 holds; all ranks call it together.

        Raises:
            WorkloadError: rank 0's does not fit on the others; raised on all of them.
        """
        with self._device.exempt():
            make_alike(self.live)
            place = self.stream.position, self.stream.passes, self.stream.pass_began
            told = self.steps, place, self.live.course
            self.steps, first, self.live.course = from_first(told, "The place in data and schedule")
        if place != first:  # an update raised on this rank alone, say, and counted on the others
            self.stream.go_to(*first)
        self.stepper.voting.watch.begin_anew()

    def info(self) -> WorkloadInfo:
        """Sizes of what was loaded."""
        eval_len = self.evaluator.length if self.evaluator else None
        return workload_info(self.workload, self.live, self.stream, eval_len, self._device)

    def doing(self) -> tuple[str, float]:
        """Return the part of the step under way, in words, and when that step began (on ``time.monotonic``)."""
        if self.stepper.phase == EVALUATION:
            return f"the evaluation after step {self.steps}", self.stepper.began_s
        return f"the {self.stepper.phase} part of step {self.steps + 1}", self.stepper.began_s

    def go_on_from(
        self, steps: int, settings: Settings, optimizer: Optimizer, course: Course, memory: RatesMemory
    ) -> None:
        """Weights were put back to what they were after ``steps``, and all the others are of that moment."""
        self.steps = steps
        self.live.go_on_with(optimizer, settings, course, memory)
        self.stepper.voting.watch.begin_anew()
        self._settings_id = self._failed_id = self._proven_id = -1
        self._flipped = False
        self._noise = NoiseScale(self.stream.size)

    def reseed(self, seed: int) -> bool:
        """Let the order of the data and training's random numbers begin at another seed, if no step was done yet."""
        if self.steps == 0:
            self.stream.seed, self.random = seed, OwnNumbers(seed, self.stream.rank)
            self.stream.go_to(self.stream.position, self.stream.passes, self.stream.pass_began)  # nothing read ahead
        return self.steps == 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, what is drawn are training's own random numbers; those of cells stay where they are."""
        with self._device.exempt():  # for some kilobytes: the limit is met inside of steps, which can fail
            self.random.exchange()
        try:
            yield
        finally:
            with self._device.exempt():
                self.random.exchange()

    def close(self) -> str:
        """Leave the model as it was handed over: no hooks, no gradients. Returns what could not be left so."""
        lost = self.live.close(self.steps)
        self.stepper.close()
        self.stream.close()
        return lost

    def run(self, chunk: Chunk) -> ChunkReply:
        """Train one chunk, which ends early on all ranks alike: after a failure, a nudge or an evaluation."""
        if chunk.settings_id == self._failed_id:
            return ChunkReply(self.stream.rank, (), self._device.reading())
        with self.drawing():
            return self._train(chunk)

    def _train(self, chunk: Chunk) -> ChunkReply:
        signals.catch_up(chunk.nudges)
        failure = self._apply(chunk) or self._look_at_weights()
        self._leaks.chunk_begins(self._device.reading().live_bytes)
        samples, notes, outcomes = list[Sample](), list[str](), list[Outcome]()
        held = 0  # numbers on the device
        for _ in range(chunk.steps if chunk.traced or chunk.nudges > self._left_after else 0):
            outcome, sample = self._step(failure, chunk)
            samples.append(sample)
            outcomes.append(outcome)
            self._latest = self._latest if outcome.discarded else outcome.timings
            notes += outcome.notes
            held += 1 + (outcome.scales is not None) + (outcome.squares is not None) + (outcome.lost is not None)
            self._leaks.step_ended(sample, numbers=held)
            failure = outcome.failure
            if outcome.discarded:
                self._failed_id = chunk.settings_id
                failure = explained(failure, self.stream, self.live.settings, self._device)
            elif outcome.last:
                self._left_after = chunk.nudges
            if outcome.last or self._evaluates_now(chunk):
                break
        evaluated = None
        if chunk.evaluate or (samples and samples[-1].done and self._evaluates_now(chunk)):
            evaluated, failure = self._evaluate(failure, chunk.settings_id)
            if evaluated is None and chunk.steps:  # on every rank
                self._left_after = chunk.nudges
        # Reading a loss or an event waits for the device, so it is done once a chunk.
        seen = self.live.settings.samples_per_rank
        complete = tuple(completed(*pair, self._noise, seen) for pair in zip(samples, outcomes, strict=True))
        self.update_times.note(self.live, complete)
        leaks, told = self._leaks.take(), (*self.stream.take_skipped(), *notes)
        went_well = samples and samples[-1].done and (evaluated or not self._evaluates_now(chunk))  # on all ranks
        traced = zip(samples, outcomes, strict=True) if chunk.traced and went_well else ()
        return ChunkReply(
            rank=self.stream.rank,
            samples=complete,
            reading=self._device.reading(),
            failure=failure,
            leaks=leaks,
            evaluated=evaluated,
            notes=told,
            lanes=tuple(outcome.timings.lanes(self.stream.rank, sample.step) for sample, outcome in traced),
        )

    def lanes(self) -> StepLanes | None:
        """Return the latest step that was done, part by part; ``None`` before one was."""
        return self._latest.lanes(self.stream.rank, self.steps) if self._latest else None

    def record(self) -> Timeline | None:
        """Take one step, recorded allocation by allocation, undone on all ranks; ``None`` when another rank failed.

        Raises:
            WorkloadError: this rank could not finish it.
        """
        chunk = Chunk(self.live.settings, self._settings_id, 1, trial=True, ledger_steps=1)
        with leaving_no_cache(self._device), self.drawing(), self.trying(chunk) as failure:
            outcome, _ = self._step(failure, chunk)
        check_together(outcome)
        if outcome.failure:
            raise WorkloadError(f"The step could not be recorded: {outcome.failure.message}")
        record, self.stepper.record = self.stepper.record, None
        if record is None or outcome.ledger is None:
            return None
        return record.timeline(self.stream.rank, self.steps + 1, outcome.ledger)

    @contextmanager
    def aside(self, settings: Settings) -> Iterator[None]:
        """Inside, steps are taken that are not training's, under settings that may be unknown here."""
        settings.check_known()
        scaler_state = self.live.scaler.state_dict()
        try:
            # A scale that has yet to settle would let fp16 skip the update, and with it the optimizer's state.
            self.live.replace_scaler(scaler_state | ({"scale": 1.0} if scaler_state else {}))
            with self.drawing():
                yield
        finally:
            self.live.replace_scaler(scaler_state)
            self._device.reset_peak()

    def _evaluates_now(self, chunk: Chunk) -> bool:
        """Return whether to evaluate the model after the latest step; the same on all ranks."""
        return self.evaluator is not None and chunk.eval_every > 0 and self.steps % chunk.eval_every == 0

    def _evaluate(self, failure: Failure | None, settings_id: int) -> tuple[Evaluated | None, Failure | None]:
        """Evaluate, if there is anything to evaluate on; with a ``failure``, all ranks learn that it cannot be done."""
        if self.evaluator is None:
            return None, failure
        self.stepper.phase, self.stepper.began_s = EVALUATION, time.monotonic()
        with leaving_no_cache(self._device):
            found, failure = self.evaluator.run(failure)
        if found is None:
            return None, failure
        now_s = time.time() - self._started_s
        return Evaluated(self.stream.rank, self.steps, now_s, settings_id, **dataclasses.asdict(found)), None

    def try_step(self, failure: Failure | None, chunk: Chunk) -> Trial:
        """Take one step of a trial, undone on all ranks. A failure to apply its settings fails it from the start."""
        return Trial.of(self._step(failure, chunk)[0], self.stepper, self.live, self._device)

    def look_into_step(self, looks: Looks, settings: Settings) -> Failure | None:
        """Take one step under these settings, which is undone, and look into it. All ranks do that."""
        chunk = Chunk(settings, self._settings_id, 1, trial=True)
        self.stepper.looks = looks
        try:
            with leaving_no_cache(self._device), self.aside(settings), self.trying(chunk) as failure:
                return self.try_step(failure, chunk).failure
        finally:
            self.stepper.looks = Looks()

    @contextmanager
    def trying(self, chunk: Chunk) -> Iterator[Failure | None]:
        """Inside, steps are under the settings of a trial; gives why these cannot be applied."""
        settings, settings_id = self.live.settings, self._settings_id
        flipped, recorded_steps = self._flipped, self._recorded_steps
        with self._garbage.taken_away(cells.ran()), self.live.kept():
            try:
                why_not = self._apply(chunk)
                with room_of_state_that_leaves(self.live, self._device):
                    yield why_not
            finally:
                back = Chunk(settings, settings_id, 0, trial=True)
                self._follow(back)  # at the next chunk's beginning, if the ranks came apart
                self._apply_here(back)  # whatever could be applied is taken back
                self._flipped, self._recorded_steps = flipped, recorded_steps

    def _apply(self, chunk: Chunk) -> Failure | None:
        """Switch to the chunk's settings, or say why it cannot be done; a trial's ``settings_id`` is not theirs."""
        return self._follow(chunk) or self._apply_here(chunk)  # in this order: the latter may fail on one rank only

    def _follow(self, chunk: Chunk) -> Failure | None:
        """Bring what ranks do together to the chunk's settings."""
        self.stepper.phase = "settings"
        try:
            link_settings.follow(chunk.settings, self._device)
            if not chunk.trial:
                self.live.join_shards(chunk.settings)
            self.live.narrowed.follow(chunk.settings)
        except BaseException as error:
            self._settings_id = NO_CONFIGURATION
            return self.stepper.failure(error)
        return None

    def _apply_here(self, chunk: Chunk) -> Failure | None:
        """Bring what is this rank's own to the chunk's settings."""
        try:
            chunk.settings.check_together(self.stream.size)  # a state may come from another number of ranks
            if chunk.steps:
                self.live.modes.resume()
            self.stream.load_with(chunk.settings)
            if chunk.settings_id == self._settings_id and not chunk.trial:
                return None
            changed = chunk.settings != self.live.settings
            self.live.instead_of = self.live.instead_of if chunk.trial else chunk.instead_of
            self.live.apply(chunk.settings)
        except BaseException as error:
            self._settings_id = NO_CONFIGURATION
            return self.stepper.failure(error)
        if not chunk.trial:
            self._device.empty_cache()  # what a configuration reserves is its own need, and not what came before
        self._settings_id = chunk.settings_id
        self._flipped, self._recorded_steps = self._flipped or changed, 0
        return None

    def _look_at_weights(self) -> Failure | None:
        """Cells may have put other weights into the model."""
        if cells.ran() == self._cells:
            return None
        self._cells = cells.ran()
        self._proven_id = -1  # the next update may fail for what a cell has set: it is prepared to be undone
        self._recorded_steps = 0  # what is known of the memory of steps may be of another model
        self._device.empty_cache()
        self.stepper.phase = "forward"
        self.stepper.voting.reduction.come_last()
        try:
            check_groups(self.live.optimizer)
            self.live.refuse_strangers()
            self.stream.check_length()
        except Exception as error:  # len() of the data may be the user's code
            self._cells = -1  # to be looked at again
            return self.stepper.failure(error)
        return None

    def _step(self, failure: Failure | None, chunk: Chunk) -> tuple[Outcome, Sample]:
        """Take one step of the chunk. A failure to apply the settings fails it from the start, on all ranks."""
        recorded, compiled_s = failure is None and self._is_recorded(chunk), self.live.recomputing.compiled_s
        proven, nudges = self._settings_id == self._proven_id, sys.maxsize if chunk.traced else chunk.nudges
        order = StepOrder(self.steps, chunk.trial, nudges, proven, recorded, ReductionConfig.under(chunk.settings))
        self.stepper.update_s = self.update_times.of(chunk.settings) or 0.0
        learning_rate = self.live.learning_rate  # a scheduler may set the next one when the step is done
        outcome = self.stepper.take(order, failure)
        if outcome.discarded:
            event = outcome.failure.kind if outcome.failure else "discarded"
        else:
            event = "tried" if chunk.tried else "flip" if self._flipped else ""
            self.steps += 1
            self._flipped = False
            if proven or not outcome.skipped:  # asking waits for the device
                self._proven_id = self._settings_id
                self._recorded_steps += recorded
        sample = begun(
            outcome,
            rank=self.stream.rank,
            step=self.steps,
            time_s=time.time() - self._started_s,
            samples_per_s=self.live.settings.samples_per_rank / outcome.timings.step_s,
            settings_id=chunk.settings_id,
            event=event,
            learning_rate=learning_rate,
            first=self._is_first,
            compile_s=self.live.recomputing.compiled_s - compiled_s,
        )
        self._is_first &= outcome.discarded
        return outcome, sample

    def _is_recorded(self, chunk: Chunk) -> bool:
        """Return whether this step gets a ledger: some regularly, and the first ones under new settings."""
        first = self._recorded_steps < FIRST_LEDGERS
        return chunk.ledger_steps > 0 and (first or chunk.trial or self.steps % chunk.ledger_steps == 0)
