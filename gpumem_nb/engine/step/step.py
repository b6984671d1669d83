"""One optimizer step, taken by all ranks together: forward, vote, update or undo."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...internals.torch_internals import Update, run_post_hooks, step_hooks_held_back, step_pre_hooks
from ...memory.device import Device
from ...memory.leaks.detector import LeakDetector
from ...memory.ledger.account import Account
from ...memory.ledger.recorder import Recorder
from ...memory.tensors import tensors_in
from ...shared.categories import INPUTS
from ...shared.errors import WorkloadError
from ...shared.messages import Failure
from ...shared.step_times import BACKWARD, COPY, DATA, FORWARD, REDUCTION, TOOLKIT, UPDATE
from ..data.fetching import to_device
from ..data.stream import Stream
from ..link.communicator import here
from ..link.signals import interruptible
from ..replay.selective import Learned
from ..undo.step_undo import ForwardState, ForwardUndo, UpdateUndo, WrittenByForward
from . import optimizers
from .ambient import Ambient, autocast, check_no_backward, updates_refused
from .checks import checked_loss
from .failures import failure_of
from .gradients import NewGradients
from .known_updates import KnownUpdates
from .live_model import LiveModel
from .optimizer_state import state_of
from .partition import Exchange
from .parts import in_groups
from .pieces import by_pieces
from .samples import Looks, Outcome
from .step_clock import UNDOING, StepClock
from .step_items import StepItems
from .voting import MOST_ATTEMPTS, StepOrder, Voting


class Stepper:
    """Takes the steps of one rank. Whatever goes wrong on any rank, all of them end each step in the same way.

    Attributes:
        voting: how the ranks come to the same end.
        began_s: when the latest step began, on the clock of ``time.monotonic``.
        record: the allocations of the latest step, if it was recorded.
        work_s: what the latest trial took until its update, without ``data_s``.
        data_s: how long that step had waited for its data.
        update_s: how long its update would take, as far as is known.
        not_foreseen: why the latest update on trial had to be taken and undone; empty where a dry run told enough.
        looks: who looks into steps.
    """

    def __init__(self, live: LiveModel, stream: Stream, device: Device, leaks: LeakDetector) -> None:
        self._live = live
        self._stream = stream
        self._device = device
        self._leaks = leaks
        self._updates = KnownUpdates()
        self.voting = Voting(live, stream.rank, stream.size, device)
        self._items = StepItems(live, stream, device)
        self._loss, self._forward_state = live.loss, ForwardState(live.parts.named.values(), live.loss)
        self._written = WrittenByForward()
        self._hooks: tuple[Any, ...] = ()
        self._hook_state = ForwardState(())
        leaks.let_go = self._let_go
        self._phase = "settings"
        self.began_s = time.monotonic()
        self.record: Account | None = None
        self.work_s = self.data_s = self.update_s = 0.0
        self._clock = StepClock(device.torch_device)
        self.looks, self.not_foreseen = Looks(), ""
        self._new = NewGradients(())  # in the micro-batch under way
        self._scales: Tensor | None = None  # of the loss, before and after the update
        self._done = 0  # steps before the one under way
        self._after_update: Failure | None = None  # which counts, so the next step tells of it

    @property
    def phase(self) -> str:
        """The part of the step under way."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if Recorder.current:
            Recorder.current.mark(phase)

    def enter(self, part: str, idle: bool = False) -> None:
        """Count time for this part of the step from now on; ``idle``: the device has finished all work before it."""
        self._clock.enter(part, idle)

    def take(self, order: StepOrder, failure: Failure | None) -> Outcome:
        """Take one step; with a ``failure`` from before it, this rank fails it."""
        self._device.reset_peak()
        self._clock.begin()
        self.began_s, self._done = time.monotonic(), order.step
        self.record = None
        failure = failure or self._data_ready(order.trial)
        for _ in range(MOST_ATTEMPTS):
            with self._recorder().watching() if order.recorded else nullcontext():
                try:
                    outcome, failure = self._attempt(order, failure)
                except BaseException:  # which should not come: the next step must not find what is left of this one
                    self.voting.reduction.forget()
                    self._live.zero_grad()
                    raise
            if outcome:
                return outcome
        return self.take(order, self.failure(WorkloadError(self.voting.restless(self._written.known))))

    def _recorder(self) -> Recorder:
        return Recorder(self._device, *self._live.parts.named.values(), head=self._live.recomputing.wide_head)

    def _data_ready(self, trial: bool) -> Failure | None:
        """Let workers begin outside of what is recorded: they must not inherit the recorder."""
        self._begin(DATA)
        try:
            with interruptible():
                settings = self._live.settings
                self._stream.make_ready(settings.batch_size, settings.accumulation_steps, trial)
        except BaseException as error:
            return self.failure(error)
        finally:
            self.enter(TOOLKIT)
        return None

    def _begin(self, part: str) -> None:
        """A part of the step begins."""
        self.phase = part
        self.enter(part)

    def _attempt(self, order: StepOrder, failure: Failure | None) -> tuple[Outcome | None, Failure | None]:
        """Forward, vote, update or undo. No outcome: all ranks take the step again, with this failure if there is one.

        Every attempt starts from no gradients, whatever a cell has left.
        """
        before, loss, self._scales = None, None, None
        self.voting.attempt_begins(order)
        self._new = NewGradients.from_none(self._live.parameters)
        if failure is None and not order.trial:
            failure, self._after_update = self._after_update, None
        failure = self._items_counted(failure)
        if failure is None:
            before, loss, failure = self._forward(order)
        self.phase = REDUCTION
        self.enter(TOOLKIT)
        votes, failure = self.voting.vote(order, loss, failure, self)
        if votes.unsure and not votes.failed:
            self._undo(before)
            return None, self.voting.agree_anew(votes, self)
        discarded = votes.failed or votes.nonfinite
        if not discarded:
            failure, discarded = self._end(order.trial, votes.careful, before)
        self.enter(TOOLKIT)
        self._live.zero_grad(None if discarded else self._forward_state.of_parts)
        if discarded:
            self._undo(before)
            if not order.trial:  # whose end is not that of what is tried
                gc.collect()  # what was under way may hang together in circles, with activations among them
                self._device.empty_cache()  # it lies in pieces, and another rank may have failed on the same GPU
        else:
            self._stream.advance(self._live.settings.batch_size, self._live.settings.accumulation_steps)
            self.voting.counted(order)
            self._told_later(self._schedule_goes_on)
        notes = () if discarded else (*self.voting.newly_partial(), *self._live.recomputing.told())
        return self._measured(loss, failure, discarded, discarded or votes.leave, notes), failure

    def failure(self, error: BaseException) -> Failure:
        """Return what went wrong in the part of the step under way."""
        came = self._new.weights()
        return failure_of(error, self._stream.rank, self.phase, self._live.model, came, self._device)

    def close(self) -> None:
        """Take the hooks off the parameters again."""
        self.voting.reduction.remove()

    def _items_counted(self, failure: Failure | None) -> Failure | None:
        """Let a loss that divides by what the steps of all ranks hold know that; this rank may fail in it."""
        if not self._items.counted:
            return failure
        self._begin(DATA)
        try:
            self._items.count(failure is not None)
        except BaseException as error:
            failure = failure or self.failure(error)
        self.enter(TOOLKIT)
        return failure

    def _forward(self, order: StepOrder) -> tuple[ForwardUndo | None, Tensor | None, Failure | None]:
        """Forward and backward: what undoes them, the loss, or what went wrong."""
        before, ambient = None, Ambient()
        self.phase = FORWARD
        try:
            here().check()
            self.enter(UNDOING)
            self._live.waits.put_away(self._live.optimizer)
            copy = not (order.trial or order.proven)
            weights = self._written.before(
                optimizers.may_write(self._live.optimizer), self._live.parts.parameters(), copy
            )
            self.enter(TOOLKIT)
            if self._live.loss is not self._loss:  # a knob has put another one in its place
                self._loss = self._live.loss
                self._forward_state = ForwardState(self._live.parts.named.values(), self._loss)
            before = ForwardUndo(self._forward_state, weights)
            self.voting.begin(order)
            with nullcontext() if order.trial else self._leaks.step():
                loss = self._forward_backward()
            before.watch_no_more()
            if not order.trial:  # one in evaluation mode says nothing of those in training mode
                self._written.after(weights)
            return before, loss, None
        except BaseException as error:  # a rank that left without a vote would keep the others waiting
            learned = isinstance(error, Learned)
            failure = self.failure(error)
            self._live.recomputing.abandon()
            with self._device.exempt():
                ambient.restore()
        if learned:
            self._undo(before)
            return self._forward(order)
        return before, None, failure

    def _undo(self, undo: ForwardUndo | UpdateUndo | None) -> None:
        """Put back what a step has changed; what could not be put back fails the next one, which tells of it."""
        try:
            if undo:
                undo.undo()
        except BaseException as error:
            failure = self.failure(error)
            told = "a step was undone, and what it had changed could not all be put back"
            self._after_update = self._after_update or replace(failure, message=f"{told}: {failure.message}")

    def _forward_backward(self) -> Tensor:
        """Accumulate the gradients of all micro-batches of this step; returns the mean loss."""
        settings, scaler = self._live.settings, self._live.scaler
        device = self._device.torch_device
        total = torch.zeros((), dtype=torch.float32, device=device)
        with self._live.recomputing.on(), updates_refused(), interruptible():
            self._begin(DATA)
            batches = iter(self._items.batches())
            for index in range(settings.accumulation_steps):
                batch = next(batches)  # no loop over them, which would hold what was copied
                self.enter(COPY)
                batch = to_device(batch, device, copy=self._stream.foreign)
                if Recorder.current:
                    Recorder.current.claim(INPUTS, tensors_in(batch))
                self._live.recomputing.stays(batch)
                self._begin(FORWARD)
                self._new = NewGradients.beside(self._live.parameters) if index else self._new
                with autocast(settings.precision, device.type):
                    loss = self._live.loss(self._live.model, batch)
                    check_no_backward(self._new.weights())
                    loss = checked_loss(loss) / settings.accumulation_steps
                self._live.recomputing.forward_ended()
                self.looks.batch(batch)
                del batch
                self._begin(BACKWARD)
                if index == settings.accumulation_steps - 1:
                    self.voting.reduction.arm(self.enter)
                (scaler.scale(loss) if settings.precision == "fp16" else loss).backward()
                total += loss.detach().float()
                self._begin(DATA)
            self.enter(TOOLKIT)
            self._live.recomputing.finished()
        return total

    def _end(self, trial: bool, careful: bool, before: ForwardUndo | None) -> tuple[Failure | None, bool]:
        """Update, or leave a trial; returns this rank's failure and whether the step is discarded."""
        if trial:
            return self._leave_trial(), True
        if careful:
            return self._update_or_undo(before)
        if self._hooks:  # which are no longer there
            self._hooks, self._hook_state = (), ForwardState(())
        state_of(self._live.optimizer).spread(self._update())
        return None, False

    def _leave_trial(self) -> Failure | None:
        """Take no update; where the trial is recorded, find out what that would allocate."""
        self.phase = UPDATE
        try:
            self.looks.gradients()
            self.work_s, self.data_s = self._clock.until_now()
            if Recorder.current:
                update, self.not_foreseen = self._updates.in_question(self._live, Recorder.current, self._device)
                self.record = Recorder.current.end(update, self.update_s)
            return None
        except BaseException as error:
            return self.failure(error)

    def _update_or_undo(self, before: ForwardUndo | None) -> tuple[Failure | None, bool]:
        """Update, and undo it on all ranks if one cannot; returns this rank's failure and whether it was undone."""
        self.phase = UPDATE
        undo, scaler_state, failure, exchange = None, None, None, None
        updates = list[Update]()
        try:
            self.enter(UNDOING)
            scaler_state = self._live.scaler.state_dict()  # which waits for the device: an error of its comes here
            kept = before.weights.copied if before and before.weights else ()
            weights = (weight for weight in optimizers.may_write(self._live.optimizer) if id(weight) not in kept)
            undo = UpdateUndo(weights, self._live.optimizer, self._before_hooks())
            with step_hooks_held_back(self._live.optimizer, pre=False) as updates:
                exchange = self._update()
            optimizers.check_state(self._live.optimizer)
            self.enter(TOOLKIT)
        except BaseException as error:
            failure = self.failure(error)
        try:
            self.enter(REDUCTION)
            undone = here().any_rank(failure is not None, "update")
        except BaseException as error:  # without a vote it is not known whether the update counts
            failure, undone = failure or self.failure(error), True
            self.voting.watch.ask()  # it may count on others
            here().leave("the vote on an update")
        self.enter(TOOLKIT)
        if undone:
            self._undo(undo)
            if scaler_state is not None:
                self._live.replace_scaler(scaler_state)
        else:
            self.enter(UPDATE)
            state_of(self._live.optimizer).spread(exchange)
            self._told_later(lambda: run_post_hooks(self._live.optimizer, updates))
        return failure, undone

    def _before_hooks(self) -> ForwardUndo | None:
        """Return the state before the user's hooks around the update run, if there are any."""
        hooks = step_pre_hooks(self._live.optimizer)
        if hooks != self._hooks:
            self._hooks, self._hook_state = hooks, ForwardState(self._live.parts.named.values(), *hooks, on_host=True)
        return ForwardUndo(self._hook_state) if hooks else None

    def _let_go(self) -> None:
        for state in (self._forward_state, self._hook_state):
            state.let_go()

    def _told_later(self, work: Callable[[], None]) -> None:
        """Do what belongs to an update that counts already on all ranks: what it raises fails the step after it."""
        self._begin(UPDATE)
        try:
            work()
        except BaseException as error:
            failure = self.failure(error)
            told = "after the update of the step before, which counts, a step hook or the scheduler failed"
            self._after_update = self._after_update or replace(failure, message=f"{told}: {failure.message}")

    def _update(self) -> Exchange | None:
        """Update what this rank updates; returns what gives it to the others, where they update other parts."""
        self._begin(UPDATE)
        settings, optimizer = self._live.settings, self._live.optimizer
        scaler, form = self._live.scaler if settings.precision == "fp16" else None, state_of(optimizer)
        rows, norms = self._live.shares.of(in_groups(optimizer))
        pieces = self._live.pieces(optimizer, self._stream.seed, self._done)
        step = by_pieces(pieces, optimizer, optimizers.scaled_step(scaler, optimizer))
        how = optimizer, scaler, settings.clip_norm, step, form.updating
        self._scales = optimizers.update_share(*how, rows, norms)
        if Recorder.current:
            Recorder.current.claim_model(self._live.parts.parameters(), optimizer.state)
        return form.after_update(settings, rows)

    def _schedule_goes_on(self) -> None:
        scales = self._scales
        # Asking waits for the device, so it is done only where the answer changes a rate.
        self._live.step_counted(skipped=scales is not None and self._live.course.moves and bool(scales[1] < scales[0]))

    def _measured(
        self,
        loss: Tensor | None,
        failure: Failure | None,
        discarded: bool,
        last: bool,
        notes: tuple[str, ...],
    ) -> Outcome:
        self.enter(TOOLKIT)
        reading = self._device.reading()
        if Recorder.current and not discarded:
            self.record = Recorder.current.end()
        ledger = replace(self.record.ledger(), **self._live.recomputing.host_bytes._asdict()) if self.record else None
        reduction = self.voting.reduction
        took = self._clock.end(reduction.transfers)
        scales, squares = (None, None) if discarded else (self._scales, self.voting.squares)
        return Outcome(loss, failure, discarded, last, reading, ledger, took, reduction.lost, notes, scales, squares)
