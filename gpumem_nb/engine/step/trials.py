"""Times of steps under other settings, from whole steps that are undone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...memory.device import Device, leaving_no_cache
from ...memory.growth import Blocks
from ...memory.ledger.trace import Trace
from ...memory.prediction import SmallSteps, forecast, largest
from ...shared.allocator_settings import AllocatorSettings
from ...shared.categories import CATEGORIES, OPTIMIZER_STATE, PARAMETERS
from ...shared.errors import TrialFailed, WorkloadError
from ...shared.forecast import (
    BY_PEAKS,
    FEWEST,
    UPDATE_ON_SCRATCH,
    UPDATE_SCALED,
    UPDATE_TRAINED,
    UPDATE_UNKNOWN,
    Forecasts,
    Rehearsal,
)
from ...shared.messages import Chunk, Failure
from ...shared.questions import StepsAmong
from ...shared.settings import Settings
from ...shared.step_times import DATA, TOOLKIT, StepTimes
from ..link.communicator import here
from ..link.group import among
from .dry_update import AskedUpdate, timed_on_scratch
from .live_model import LiveModel
from .optimizers import is_torchs
from .samples import Outcome
from .step import Stepper
from .step_clock import StepTimings
from .update_times import leaving_bytes

if TYPE_CHECKING:
    from .trainer import Trainer

MOST_STEPS = 5  # after one that warms up
LONGEST_S = 0.3  # no further step is begun after that, but for the second
LONGEST_FIRST_S = 2.0  # nor after a first one that took so long, of which warming up is a small part on a CPU
FEWEST_ON_GPU = 2  # the first one may load kernels for many times as long as a step takes
MULTIPLIED = 2  # steps at least, of two micro-batches that stand for many: what warming up takes would count as often
LEAST_SHARE = 0.25  # of two micro-batches that the second one takes, whatever noise says

Trying = Callable[[Chunk], AbstractContextManager[Failure | None]]
Step = Callable[[Failure | None, Chunk], tuple[float, float, Failure | None]]


def timed(trying: Trying, step: Step, chunk: Chunk, fewest: int = 1) -> tuple[tuple[float, ...], Failure | None]:
    """The times of a few steps in seconds, as many on all ranks; none where one failed, and why if it failed here.

    Of several micro-batches one and two are timed, because all after the first take alike.

    Args:
        trying: inside of it steps are under the settings of a chunk; gives why these cannot be applied.
        step: takes a step of it, unless something failed before, and undoes it: what it worked and how long it waited
            for data in seconds, or why not.
        chunk: a trial of the settings to time.
        fewest: how many are taken at least; of more than one the first does not count.
    """

    def times(accumulation_steps: int, fewest: int) -> tuple[list[float], Failure | None]:
        settings = chunk.settings.replace(accumulation_steps=accumulation_steps)
        return _times(trying, step, replace(chunk, settings=settings), fewest)

    count = chunk.settings.accumulation_steps
    two, failure = times(min(count, 2), max(fewest, MULTIPLIED if count > 2 else 1))
    if not two or count <= 2:
        return tuple(two), failure
    one, failure = times(1, fewest)
    if not one:
        return (), failure
    least = statistics.median(one)
    return tuple(of_two + (count - 2) * max(LEAST_SHARE * of_two, of_two - least) for of_two in two), None


def _times(trying: Trying, step: Step, chunk: Chunk, fewest: int) -> tuple[list[float], Failure | None]:
    """Each step with what the first waited for data: later ones get the same samples, which are there already."""
    found: list[float] = []
    data_s = 0.0
    with trying(chunk) as why_not:
        began_s = time.monotonic()
        while True:
            work_s, waited_s, failure = step(why_not, chunk)
            if here().any_rank(failure is not None, "timing"):
                return [], failure
            data_s = data_s if found else waited_s
            found.append(work_s + data_s)
            took_s = time.monotonic() - began_s
            longest_s = LONGEST_S if len(found) > 1 else LONGEST_FIRST_S
            enough = len(found) > MOST_STEPS or (took_s > longest_s and len(found) >= fewest)
            if here().any_rank(enough, "timing on"):
                return found[1:] or found, None


NO_CONFIGURATION = -2
"""In place of a chunk's settings_id, for what is half applied or tried out: nothing of it is proven."""
_UNCOUNTED = 2  # steps that warm up, of those that are timed
_ATTEMPTS = 2  # a model's very first step may make what later ones find


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one step that was undone.

    What failed, what it allocated (as far as it was recorded, with the update that was not taken), how long it worked
    until its update and waited for data, when its parts began, and why its update had to be taken if a dry run would
    not do.
    """

    failure: Failure | None
    trace: Trace | None
    work_s: float
    data_s: float
    timings: StepTimings
    not_foreseen: str = ""

    @classmethod
    def of(cls, outcome: Outcome, stepper: Stepper, live: LiveModel, device: Device) -> Trial:
        """Take in the latest step, while the settings that are tried are in effect; see :func:`check_together`."""
        check_together(outcome)
        record, stepper.record = stepper.record, None
        trace = record.trace(live.settings.batch_size) if record else None
        if trace and live.state_would_leave:
            trace = trace.without_state()
        if trace:
            beside = live.waits.beside(live.optimizer_in_question(), live.own_optimizer)
            if not live.waits.wanted(live.settings):  # it comes to the device with that of the one in use
                trace = trace.with_held(beside, OPTIMIZER_STATE)
            state_bytes = trace.host_state_bytes + sum(beside)
            trace = replace(trace, **live.waits.use(live.settings, state_bytes)._asdict())
        failure = beside_what_would_leave(outcome.failure, live, device)
        return cls(failure, trace, stepper.work_s, stepper.data_s, outcome.timings, stepper.not_foreseen)


def check_together(outcome: Outcome) -> None:
    """Tell why the step of a question failed here, if the ranks came apart by it: they cannot agree on that any more.

    Raises:
        TrialFailed: others waited for this rank in a collective, of the loss say.
        Separated: this rank waited for others.
    """
    if outcome.failure is None or not here().separated():
        return
    if outcome.failure.kind in ("stall", "interrupted"):  # the latter is what ranks that come late are
        here().check()
    raise TrialFailed(outcome.failure)


def beside_what_would_leave(failure: Failure | None, live: LiveModel, device: Device) -> Failure | None:
    """Return a failure of a trial; of a GPU without room, that it says nothing of what fits, if state would leave."""
    if failure is None or failure.kind != "oom" or device.kind != "cuda" or not live.state_would_leave:
        return failure
    if (failure.asked_bytes or 0) - (failure.free_bytes or 0) > leaving_bytes(live):
        return failure
    words = "the step ran out of memory beside the optimizer's state in use, which would leave with that optimizer"
    return replace(failure, kind="error", message=words)


@contextmanager
def room_of_state_that_leaves(live: LiveModel, device: Device) -> Iterator[None]:
    """Inside, a trial has the room that the state of the optimizer in use would leave it; a GPU has no more to give."""
    limit = device.reading().limit_bytes
    if device.kind == "cuda" or limit is None or not live.state_would_leave:
        yield
        return
    device.set_limit(limit + leaving_bytes(live))
    try:
        yield
    finally:
        device.set_limit(limit)
        device.empty_cache()


class Trials:
    """Asks what settings would need; all ranks ask together.

    Args:
        trainer: takes the steps.
        device: of this rank.
    """

    def __init__(self, trainer: Trainer, device: Device) -> None:
        self._trainer = trainer
        self._device = device
        self._not_foreseen = ""

    def forecast(
        self, settings: Settings, small: Sequence[int], batch_sizes: Sequence[int], most: int, longest: bool = True
    ) -> Forecasts:
        """Return what steps under other settings would need, from one recorded step at each ``small`` batch size.

        ``most`` is the largest batch size of which the largest that fits is looked for; with 0 none is. Where samples
        differ in size, steps of the ``longest`` one are taken besides.
        """
        found = self._forecast(settings, small, batch_sizes, most)
        stream = self._trainer.stream
        if not (longest and stream.varies and here().any_rank(bool(found.of or most) and not found.failure, "longest")):
            return found
        with stream.of_longest():
            of_longest = self._forecast(settings, small, batch_sizes, most)
            out = of_longest.failure is not None and of_longest.failure.kind == "oom"
            if here().any_rank(out, "fewer") and max(small) > max(FEWEST) and not stream.info.batched:
                of_longest = self._forecast(settings, FEWEST, batch_sizes, most)
        known = stream.longest()
        return found.with_longest(of_longest, known.words if known else "", known is not None and known.all_seen)

    def _forecast(self, settings: Settings, small: Sequence[int], batch_sizes: Sequence[int], most: int) -> Forecasts:
        began_s = time.monotonic()
        with leaving_no_cache(self._device), self._trainer.aside(settings):
            steps, failure, failed_batch = self._small_steps(settings, small)
        return self._forecasts(steps, began_s, batch_sizes, most, failure, failed_batch)

    def rehearse(self, settings: Settings) -> Rehearsal:
        """Return what whole steps under other settings need, and how long they take."""
        first: list[Trial] = []
        updates: list[tuple[float, str]] = []

        def step(failure: Failure | None, chunk: Chunk) -> tuple[float, float, Failure | None]:
            # Listening takes time: the first step, which warms up, is the one that is listened to.
            trial = self._trainer.try_step(failure, chunk if first else replace(chunk, ledger_steps=1))
            if trial.failure is None and not first:
                first.append(trial)
                updates.append(self._update_s(settings, trial))
            update_s = updates[0][0] if updates else 0.0
            # Workers fetch while steps are taken; steps that are undone would wait for each of them to begin.
            return trial.work_s + update_s, 0.0 if settings.num_workers else trial.data_s, trial.failure

        began_s = time.monotonic()
        with leaving_no_cache(self._device), self._trainer.aside(settings):
            compiles = settings.compile != "off"  # in the first one
            fewest = FEWEST_ON_GPU if self._device.kind == "cuda" or compiles else 1
            chunk = Chunk(settings, NO_CONFIGURATION, 1, trial=True)
            steps_s, failure = timed(self._trainer.trying, step, chunk, fewest)
            live, untrained = self._trainer.live, bool(updates) and updates[0][1] != UPDATE_TRAINED
            if steps_s and live.sharing.wanted(settings) and here().any_rank(untrained, "weights on trial"):
                gather_s, failure = self._gather_s(settings)
                steps_s = () if gather_s is None else tuple(one + gather_s for one in steps_s)
        steps = self._continued(first[:1]) if steps_s else None
        forecasts = self._forecasts(steps, began_s, [settings.batch_size], 0, failure, settings.batch_size)
        return Rehearsal(forecasts, steps_s, updates[0][1] if updates else "")

    def steps_among(self, count: int, settings: Settings, steps: int) -> StepsAmong:
        """Return how long steps take when the first so many ranks are joined to each other alone. All ranks come here.

        Raises:
            WorkloadError: steps are taken under other settings now.
        """
        if settings != self._trainer.live.settings:  # Horovod's own would have to be followed by all ranks
            raise WorkloadError("Settings were changed meanwhile. Measure again.")
        together = self._steps(settings, 1, lambda: (0.0, None))  # what a cell has changed is agreed upon by all
        if not together.times:
            return together
        update = self._update_among(settings)
        return among(count, self._device, lambda: self._steps(settings, steps, update)) or StepsAmong()

    def _steps(
        self, settings: Settings, steps: int, update: Callable[[], tuple[float | None, Failure | None]]
    ) -> StepsAmong:
        times: list[StepTimes] = []
        sent_bytes = 0
        chunk = Chunk(settings, NO_CONFIGURATION, 1, trial=True)
        with self._trainer.aside(settings), self._trainer.trying(chunk) as why_not:
            update_s, failure = update()
            if update_s is None:
                return StepsAmong(failure=failure)
            for _ in range(_UNCOUNTED + steps):
                trial = self._trainer.try_step(why_not, chunk)
                found = None if trial.failure else trial.timings.times()
                if here().any_rank(found is None, "scaling"):
                    return StepsAmong(failure=trial.failure)
                assert found is not None
                # Undoing is the toolkit's, and workers of steps that are undone begin anew with each of them.
                found = found.without(TOOLKIT, *([DATA] if settings.num_workers else []))
                times.append(found.with_update(update_s))
                sent_bytes = sum(transfer.bytes for transfer in trial.timings.transfers)
        return StepsAmong(tuple(times[_UNCOUNTED:]), sent_bytes)

    def allocators(
        self, settings: Settings, small: Sequence[int], allocators: Sequence[AllocatorSettings]
    ) -> Forecasts:
        """Return what one step needs now, and would with the caching allocator set in each of these ways.

        From one recorded step at each of the ``small`` batch sizes, as :meth:`forecast`.
        """
        began_s, batch_size = time.monotonic(), settings.batch_size
        with leaving_no_cache(self._device), self._trainer.aside(settings):
            steps, failure, failed_batch = self._small_steps(settings, small)
        now = self._forecasts(steps, began_s, [batch_size], 0, failure, failed_batch)
        if steps is None:
            return now
        others = (forecast(steps, batch_size, now.limit_bytes, one, self._device.allowed_bytes) for one in allocators)
        return replace(now, of=(*now.of, *(one.with_another_allocator() for one in others)))

    def _forecasts(
        self,
        steps: SmallSteps | None,
        began_s: float,
        batch_sizes: Sequence[int],
        most: int,
        failure: Failure | None,
        failed_batch: int,
    ) -> Forecasts:
        reading, room = self._device.reading(), self._device.room()
        limit = None if room is None else reading.reserved_bytes + room
        steps_done, seconds = self._trainer.steps, time.monotonic() - began_s
        if steps is None:
            return Forecasts(steps_done, reading, seconds, limit, failure=failure, failed_batch=failed_batch)
        allowed = self._device.allowed_bytes
        live = self._trainer.live
        blocks = Blocks.of(live.model, live.recomputing.blocks, live.parts.parameters())
        of = tuple(forecast(steps, batch_size, limit, None, allowed, blocks=blocks) for batch_size in batch_sizes)
        sure = likely = 0
        if most:
            sure, likely = (largest(steps, limit, most, allowed, certain) for certain in (True, False))
        return Forecasts(steps_done, reading, seconds, limit, of, sure, likely, update_undone=self._not_foreseen)

    def _small_steps(self, settings: Settings, small: Sequence[int]) -> tuple[SmallSteps | None, Failure | None, int]:
        """Take one step of each size, undone, and return what they allocated, or what failed here and at which size."""
        steps = None
        for _ in range(_ATTEMPTS):
            trials: list[Trial] = []
            for batch_size in small:
                sized = settings.replace(batch_size=batch_size)
                chunk = Chunk(sized, NO_CONFIGURATION, 1, trial=True, ledger_steps=1)
                with self._trainer.trying(chunk) as why_not:
                    trial = self._trainer.try_step(why_not, chunk)
                if here().any_rank(trial.trace is None, "forecast"):
                    return None, trial.failure, batch_size
                trials.append(trial)
            steps = self._continued(trials)
            if not here().any_rank(steps.how == BY_PEAKS, "forecast again"):
                break
        return steps, None, 0

    def _continued(self, trials: Sequence[Trial]) -> SmallSteps:
        """Recorded steps, ready to be continued to other batch sizes."""
        self._not_foreseen = next((trial.not_foreseen for trial in trials), "")
        return SmallSteps([trial.trace for trial in trials if trial.trace], self._trainer.stream.varies)

    def _gather_s(self, settings: Settings) -> tuple[float | None, Failure | None]:
        """Return how long ranks take to give each other weights; ``None`` where one cannot, and why if that is here."""
        live = self._trainer.live
        try:
            return live.sharing.gather_s(live.parameters, settings), None
        except Exception as error:
            if here().is_separation(error):
                raise
            return None, self._trainer.stepper.failure(error)

    def _update_among(self, settings: Settings) -> Callable[[], tuple[float | None, Failure | None]]:
        """Return what says how long an update takes on the ranks that are joined then, as :meth:`_gather_s` does.

        All ranks come here. Of a state that they share, fewer of them have a larger share each, and give others less.
        """
        (seconds, how), ranks = self._update_s(settings), here().size
        gather_s, failure = self._gather_s(settings)
        if gather_s is None or not self._trainer.live.sharing.wanted(settings):
            return lambda: (None if gather_s is None else seconds, failure)
        alone_s = max(0.0, seconds - gather_s) if how == UPDATE_TRAINED else seconds

        def among_s() -> tuple[float | None, Failure | None]:
            given_s, why_not = self._gather_s(settings)
            return None if given_s is None else alone_s * ranks / here().size + given_s, why_not

        return among_s

    def _update_s(self, settings: Settings, trial: Trial | None = None) -> tuple[float, str]:
        """Return how long an update takes that trials do not take, in seconds, and how that is known."""
        live, times = self._trainer.live, self._trainer.update_times
        if (seconds := times.of(settings)) is not None:
            return seconds, UPDATE_TRAINED
        asked, trace = AskedUpdate.of(live), trial.trace if trial else None
        # Others may change what is trained.
        if is_torchs(asked.optimizer) or (trial and trace and not trial.not_foreseen):
            found = timed_on_scratch(asked, self._device)
            if found is not None:
                return found, UPDATE_ON_SCRATCH
        of = {} if trace is None else dict(zip(CATEGORIES, trace.bytes_by_category(), strict=True))
        scaled = times.scaled(2 * of.get(PARAMETERS, 0) + of.get(OPTIMIZER_STATE, 0))
        return (0.0, UPDATE_UNKNOWN) if scaled is None else (scaled, UPDATE_SCALED)
