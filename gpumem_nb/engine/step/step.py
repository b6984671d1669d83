"""One optimizer step, taken by all ranks together: forward, vote, update or undo."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from ...internals.torch_internals import Update, run_post_hooks, step_hooks_held_back
from ...memory.device import Device
from ...memory.leaks.detector import LeakDetector
from ...memory.ledger.account import Account
from ...memory.ledger.recorder import Recorder
from ...memory.tensors import tensors_in
from ...shared.categories import INPUTS
from ...shared.errors import WorkloadError
from ...shared.messages import Failure, Ledger, Reading
from ..data.device import to_device
from ..data.stream import Stream
from ..together import collectives, nudge
from ..together.agreement import any_rank
from ..together.interrupts import interruptible
from . import optimizers
from .ambient import Ambient
from .ballot import Ballot, Votes
from .blame import failure_of, nonfinite_loss
from .checks import checked_loss
from .finite import GradientNorms
from .guard import check_no_backward, updates_refused
from .live_model import LiveModel
from .own_loss import micro_batches
from .precision import autocast
from .reduction import GradientReduction, Reduced
from .undo import ForwardState, ForwardUndo, UpdateUndo
from .weight_watch import WeightWatch

MOST_ATTEMPTS = 4  # at one step, before somebody's code is taken to change what it trains each time
# Of the parameters: more than any of torch's optimizers allocates in an update, once it has its state.
UPDATE_COPIES = 3
_RESTLESS = (
    "which weights are trained changes every time the step is tried. Let the model, the loss and their hooks leave "
    "requires_grad and the optimizer's groups as they are during a step."
)


@dataclass(frozen=True, slots=True)
class StepOrder:
    """How a step is to be taken.

    ``step``: how many were done before. ``trial``: measure it and undo it. ``nudges``: those sent before; a newer one
    makes this step the chunk's last. ``proven``: a step was finished under these settings before. ``recorded``: listen
    to every allocation.
    """

    step: int
    trial: bool
    nudges: int
    proven: bool
    recorded: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended on this rank and what it measured.

    ``discarded`` (it was undone) and ``last`` (the chunk ends with it) are the same on every rank, ``failure`` its own.
    ``loss`` is still on the device; ``reading`` is the memory at the step's end, with the step's peaks; ``ledger`` is
    there for recorded steps that were finished. ``notes`` are sentences to be said once.
    """

    loss: Tensor | None
    failure: Failure | None
    discarded: bool
    last: bool
    reading: Reading
    ledger: Ledger | None
    step_s: float
    notes: tuple[str, ...]


class Stepper:
    """Takes the steps of one rank. Whatever goes wrong on any rank, all of them end each step in the same way.

    Attributes:
        watch: compares the ranks' weights.
        began_s: when the latest step began, on the clock of ``time.monotonic``.
        record: the allocations of the latest step, if it was recorded.
    """

    def __init__(
        self,
        live: LiveModel,
        loss: Callable[[Any, Any], Tensor],
        stream: Stream,
        device: Device,
        leaks: LeakDetector,
    ) -> None:
        self._live = live
        self._loss = loss
        self._stream = stream
        self._device = device
        self._leaks = leaks
        self._reduction = self._reduce_all()
        self.watch = WeightWatch(live.parts, stream.rank)
        self._told_partial: set[int] = set()
        self._forward_state = ForwardState(live.parts.named.values(), loss)
        self._phase = "settings"
        self.began_s = time.monotonic()
        self.record: Account | None = None
        self._after_update: Failure | None = None  # which counts, so the next step tells of it
        self._norms: GradientNorms | None = None

    @property
    def phase(self) -> str:
        """The part of the step under way."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if Recorder.current:
            Recorder.current.mark(phase)

    def take(self, order: StepOrder, failure: Failure | None) -> Outcome:
        """One step; with a ``failure`` from before it, one that this rank cannot but fail."""
        self._device.reset_peak()
        start_s = time.perf_counter()
        self.began_s = time.monotonic()
        self.record = None
        failure = failure or self._data_ready()
        for _ in range(MOST_ATTEMPTS):
            with (
                Recorder(self._device, *self._live.parts.named.values()).watching() if order.recorded else nullcontext()
            ):
                try:
                    outcome, failure = self._attempt(order, failure, start_s)
                except BaseException:  # which should not come: the next step must not find what is left of this one
                    self._reduction.forget()
                    self._live.zero_grad()
                    raise
            if outcome:
                return outcome
        return self.take(order, self.failure(WorkloadError(_RESTLESS)))

    def _data_ready(self) -> Failure | None:
        """Let workers begin outside of what is recorded: they must not inherit the recorder."""
        self.phase = "data"
        try:
            with interruptible():
                self._stream.make_ready(self._live.settings.batch_size, self._live.settings.accumulation_steps)
        except BaseException as error:
            return self.failure(error)
        return None

    def _attempt(
        self, order: StepOrder, failure: Failure | None, start_s: float
    ) -> tuple[Outcome | None, Failure | None]:
        """Forward, vote, update or undo. No outcome: all ranks take the step again, with this failure if there is one.

        Every attempt starts from no gradients, whatever a cell has left.
        """
        before, loss = None, None
        self._live.zero_grad()
        if not order.trial:
            failure, self._after_update = failure or self._after_update, None
        if failure is None:
            before, loss, failure = self._forward(order)
        votes, reduced, failure = self._vote(order, loss, failure)
        discarded = votes.failed or votes.nonfinite
        if not discarded and (votes.unsure or reduced.missed):
            if before:
                before.undo()
            return None, self._agree_anew(votes, reduced)
        if not discarded and votes.careful:
            failure, discarded = self._update_or_undo(order.trial)
        elif not discarded:
            self._update()
        self._live.zero_grad()
        if discarded:
            if before:
                before.undo()
            gc.collect()  # what was under way may hang together in circles, with activations among them
        else:
            self._stream.advance(self._live.settings.batch_size, self._live.settings.accumulation_steps)
            self._told_later(self._live.step_counted)
        notes = () if discarded else self._newly_partial(reduced)
        return self._measured(start_s, loss, failure, discarded, discarded or votes.leave, notes), failure

    def failure(self, error: BaseException) -> Failure:
        """What went wrong in the part of the step under way."""
        return failure_of(error, self._stream.rank, self.phase, self._live.model, self._reduction.latest, self._device)

    def close(self) -> None:
        """Take the hooks off the parameters again."""
        self._reduction.remove()

    def _forward(self, order: StepOrder) -> tuple[ForwardUndo | None, Tensor | None, Failure | None]:
        """Forward and backward: what undoes them, the loss, or what went wrong."""
        before, ambient = None, Ambient()
        self.phase = "forward"
        try:
            collectives.check()
            before = ForwardUndo(self._forward_state)
            if self.watch.due(order.step):
                self.watch.begin()
            with self._leaks.step():
                return before, self._forward_backward(), None
        except BaseException as error:  # a rank that left without a vote would keep the others waiting
            failure = self.failure(error)
            self._live.abandon_forward()
            with self._device.exempt():
                ambient.restore()
        return before, None, failure

    def _forward_backward(self) -> Tensor:
        """Accumulate the gradients of all micro-batches of this step; returns the mean loss."""
        settings, scaler = self._live.settings, self._live.scaler
        device = self._device.torch_device
        total = torch.zeros((), device=device)
        self.phase = "data"
        with updates_refused(), interruptible():
            count = settings.accumulation_steps
            batches = self._stream.micro_batches(settings.batch_size, count)
            for index, batch in enumerate(micro_batches(self._loss, self._live.model, batches, count)):
                batch = to_device(batch, device, copy=self._stream.foreign)
                if Recorder.current:
                    Recorder.current.claim(INPUTS, tensors_in(batch))
                self.phase, self._reduction.latest = "forward", None
                with autocast(settings.precision, device.type):
                    loss = self._loss(self._live.model, batch)
                    check_no_backward(self._reduction.latest)
                    loss = checked_loss(loss) / settings.accumulation_steps
                del batch
                self.phase = "backward"
                if index == settings.accumulation_steps - 1:
                    self._reduction.arm()
                (scaler.scale(loss) if settings.precision == "fp16" else loss).backward()
                total += loss.detach().float()
                self.phase = "data"
            self._live.finished_backward()
        return total

    def _vote(
        self, order: StepOrder, loss: Tensor | None, failure: Failure | None
    ) -> tuple[Votes, Reduced, Failure | None]:
        """Average the gradients over all ranks, and learn what any of them votes for; this rank may fail in it."""
        self.phase = "reduction"
        try:
            # A failed rank has room for the zeros it sends: whatever its step held is gone by now.
            with self._device.exempt():
                ballot, failure = self._ballot(order, loss, failure)
                reduced = self._reduction.finish(ballot.numbers(self._device.torch_device))
        except HorovodInternalError as error:  # on every rank, because Horovod was shut down
            self._reduction.forget()
            return Votes.of_one_that_left(), Reduced([], False, ()), self.failure(error)
        votes = Votes.counted(reduced.sums, self._stream.size)
        if ballot.digest is not None and not (votes.compare or votes.differ or votes.failed):
            self.watch.agreed(order.step)
        if votes.nonfinite and failure is None and loss is not None:
            bad_loss = None if loss.isfinite() else nonfinite_loss(self._stream.rank, loss)
            failure = bad_loss or (self._norms.failure(self._stream.rank, self._live.parts) if self._norms else None)
        self._norms = None
        return votes, reduced, failure

    def _ballot(self, order: StepOrder, loss: Tensor | None, failure: Failure | None) -> tuple[Ballot, Failure | None]:
        """What this rank votes for; what goes wrong in asking fails the step."""
        nonfinite, digest = None, None
        careful = True
        try:
            if loss is not None:
                self._norms = GradientNorms(self._live.parameters)
                scaled = self._live.settings.precision == "fp16"  # in gradients; the loss is without its scale
                nonfinite = self._norms.nonfinite(loss, self._live.scaler if scaled else None)
                digest = self.watch.digest() if self.watch.due(order.step) else None
            careful = order.trial or not order.proven or self._update_may_fail()
        except BaseException as error:
            failure = failure or self.failure(error)
        left = nudge.newer_than(order.nudges)
        torn, relisted = self._reduction.torn, self._live.relisted()
        return Ballot(failure is not None, left, careful, torn, relisted, nonfinite, digest), failure

    def _agree_anew(self, votes: Votes, reduced: Reduced) -> Failure | None:
        """What all ranks do before they take a step again, because they would not have stayed the same in it."""
        try:
            if votes.compare:
                self.watch.ask()
            if votes.torn:
                self._reduction.wait_for_backward()
            if reduced.missed:
                self._reduction.regroup()
            if votes.relisted:
                self._live.relist()
                self._reduction.remove()
                self._reduction = self._reduce_all()
            if votes.differ and (message := self.watch.examine()):
                return Failure(self._stream.rank, "diverged", "reduction", message)
        except (HorovodInternalError, collectives.Separated, WorkloadError) as error:
            return self.failure(error)
        return None

    def _reduce_all(self) -> GradientReduction:
        """The reduction of all that the optimizer trains."""
        live = self._live
        self._param_bytes = sum(param.nbytes for param in live.parameters)
        return GradientReduction(live.parameters, live.sparse_places(), self._stream.size)

    def _newly_partial(self, reduced: Reduced) -> tuple[str, ...]:
        """A sentence on weights that got a gradient on some ranks only, if it was not said before."""
        new = {id(param) for param in reduced.partial} - self._told_partial
        if not new:
            return ()
        self._told_partial |= new
        names = [name for name, param in self._live.parts.named_parameters() if id(param) in new]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (f"{', '.join(names[:3])}{more}: some ranks had no gradient, which counts as zero in the average",)

    def _update_may_fail(self) -> bool:
        """Whether an update that went well before could end half way: short of memory, or in somebody's own code."""
        if not optimizers.from_torch(self._live.optimizer):
            return True
        room = self._device.room()
        return room is None or room < UPDATE_COPIES * self._param_bytes

    def _update_or_undo(self, trial: bool) -> tuple[Failure | None, bool]:
        """Update, and undo it on all ranks if one cannot, or for a trial; returns this rank's failure and if undone."""
        self.phase = "update"
        undo, scaler_state = None, self._live.scaler.state_dict()
        failure, updates = None, list[Update]()
        try:
            undo = UpdateUndo(self._live.parameters, self._live.optimizer)
            with step_hooks_held_back(self._live.optimizer, pre=trial) as updates:
                self._update()
            if trial and Recorder.current:
                self.record = Recorder.current.end()  # undoing is no part of a step
        except BaseException as error:
            failure = self.failure(error)
        try:
            undone = any_rank(failure is not None, "update") or trial
        except HorovodInternalError as error:
            failure, undone = self.failure(error), True
        if undone:
            if undo:
                undo.undo()
            self._live.replace_scaler(scaler_state)
        else:
            self._told_later(lambda: run_post_hooks(self._live.optimizer, updates))
        return failure, undone

    def _told_later(self, work: Callable[[], None]) -> None:
        """Do what belongs to an update that counts already on all ranks: what it raises fails the step after it."""
        self.phase = "update"
        try:
            work()
        except BaseException as error:
            failure = self.failure(error)
            told = "after the update of the step before, which counts, a step hook or the scheduler failed"
            self._after_update = self._after_update or replace(failure, message=f"{told}: {failure.message}")

    def _update(self) -> None:
        """Unscale, clip, update: in this order, because clipping is about true gradients."""
        self.phase = "update"
        settings, optimizer, scaler = self._live.settings, self._live.optimizer, self._live.scaler
        scaled = settings.precision == "fp16"
        if scaled:
            scaler.unscale_(optimizer)
        if settings.clip_norm is not None:
            optimizers.clip_gradients(optimizer, settings.clip_norm)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if Recorder.current:
            Recorder.current.claim_model(self._live.parameters, optimizer.state)

    def _measured(
        self,
        start_s: float,
        loss: Tensor | None,
        failure: Failure | None,
        discarded: bool,
        last: bool,
        notes: tuple[str, ...],
    ) -> Outcome:
        reading = self._device.reading()
        if Recorder.current and not discarded:
            self.record = Recorder.current.end()
        ledger = self.record.ledger() if self.record else None
        step_s = time.perf_counter() - start_s
        return Outcome(loss, failure, discarded, last, reading, ledger, step_s, notes)
