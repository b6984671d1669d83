"""One optimizer step, taken by all ranks together: forward, vote, update or undo."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from ...memory.device import Device
from ...memory.leaks.detector import LeakDetector
from ...memory.ledger.account import Account
from ...memory.ledger.recorder import Recorder
from ...memory.tensors import tensors_in
from ...shared.categories import INPUTS
from ...shared.messages import Failure, Ledger, Reading
from ..together import collectives, nudge
from ..together.agreement import any_rank
from ..together.interrupts import interruptible
from . import optimizers
from .ambient import Ambient
from .blame import failure_of, nonfinite_loss
from .checks import checked_loss
from .data import ShardedStream, to_device
from .live_model import LiveModel
from .precision import autocast
from .reduction import GradientReduction
from .undo import ForwardState, ForwardUndo, UpdateUndo

# Of the parameters: more than any of torch's optimizers allocates in an update, once it has its state.
UPDATE_COPIES = 3


@dataclass(frozen=True, slots=True)
class StepOrder:
    """How a step is to be taken.

    ``trial``: measure it and undo it. ``nudges``: those sent before; a newer one makes this step the chunk's last.
    ``proven``: a step was finished under these settings before. ``recorded``: listen to every allocation.
    """

    trial: bool
    nudges: int
    proven: bool
    recorded: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended on this rank and what it measured.

    ``discarded`` (it was undone) and ``last`` (the chunk ends with it) are the same on every rank, ``failure`` its own.
    ``loss`` is still on the device; ``reading`` is the memory at the step's end, with the step's peaks; ``ledger`` is
    there for recorded steps that were finished.
    """

    loss: Tensor | None
    failure: Failure | None
    discarded: bool
    last: bool
    reading: Reading
    ledger: Ledger | None
    step_s: float


@dataclass(frozen=True, slots=True)
class _Votes:
    """What any rank voted for: it failed; it was nudged; its update may fail; its loss is not a finite number."""

    failed: bool
    leave: bool
    careful: bool
    nonfinite: bool


class Stepper:
    """Takes the steps of one rank. Whatever goes wrong on any rank, all of them end each step in the same way.

    Attributes:
        began_s: when the latest step began, on the clock of ``time.monotonic``.
        record: the allocations of the latest step, if it was recorded.
    """

    def __init__(
        self,
        live: LiveModel,
        loss: Callable[[Any, Any], Tensor],
        stream: ShardedStream,
        device: Device,
        leaks: LeakDetector,
    ) -> None:
        self._live = live
        self._loss = loss
        self._stream = stream
        self._device = device
        self._leaks = leaks
        self._reduction = GradientReduction(live.parameters)
        self._forward_state = ForwardState(live.parts.named.values(), loss)
        self._param_bytes = sum(param.nbytes for param in live.parameters)
        self._phase = "settings"
        self.began_s = time.monotonic()
        self.record: Account | None = None

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
        with Recorder(self._device, self._live.model).watching() if order.recorded else nullcontext():
            try:
                return self._take(order, failure, start_s)
            except BaseException:  # which should not come: the next step must not find what is left of this one
                self._reduction.forget()
                self._live.model.zero_grad()
                raise

    def _take(self, order: StepOrder, failure: Failure | None, start_s: float) -> Outcome:
        """Forward, vote, update or undo."""
        before, loss = None, None
        if failure is None:
            before, loss, failure = self._forward()
        votes, failure = self._vote(order, loss, failure)
        discarded = votes.failed or votes.nonfinite
        if not discarded and votes.careful:
            failure, discarded = self._update_or_undo(order.trial)
        elif not discarded:
            self._update()
        self._live.model.zero_grad()
        if discarded:
            if before:
                before.undo()
            gc.collect()  # what was under way may hang together in circles, with activations among them
        else:
            self._stream.advance(self._live.settings.batch_size, self._live.settings.accumulation_steps)
            self._live.forget_parked_optimizer()
        return self._measured(start_s, loss, failure, discarded, last=discarded or votes.leave)

    def failure(self, error: BaseException) -> Failure:
        """What went wrong in the part of the step under way."""
        return failure_of(error, self._stream.rank, self.phase, self._live.model, self._reduction.latest, self._device)

    def close(self) -> None:
        """Take the hooks off the parameters again."""
        self._reduction.remove()

    def _forward(self) -> tuple[ForwardUndo | None, Tensor | None, Failure | None]:
        """Forward and backward: what undoes them, the loss, or what went wrong."""
        before, ambient = None, Ambient()
        self.phase = "forward"
        try:
            collectives.check()
            before = ForwardUndo(self._forward_state)
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
        with interruptible():
            batches = self._stream.micro_batches(settings.batch_size, settings.accumulation_steps)
            for index, batch in enumerate(batches):
                batch = to_device(batch, device)
                if Recorder.current:
                    Recorder.current.claim(INPUTS, tensors_in(batch))
                self.phase = "forward"
                with autocast(settings.precision, device.type):
                    loss = checked_loss(self._loss(self._live.model, batch)) / settings.accumulation_steps
                del batch
                self.phase, self._reduction.latest = "backward", None
                if index == settings.accumulation_steps - 1:
                    self._reduction.arm()
                (scaler.scale(loss) if settings.precision == "fp16" else loss).backward()
                total += loss.detach().float()
                self.phase = "data"
            self._live.finished_backward()
        return total

    def _vote(self, order: StepOrder, loss: Tensor | None, failure: Failure | None) -> tuple[_Votes, Failure | None]:
        """Average the gradients over all ranks, and learn what any of them votes for; this rank may fail in it."""
        self.phase = "reduction"
        try:
            # A failed rank has room for the zeros it sends: whatever its step held is gone by now.
            with self._device.exempt():
                ballot, failure = self._ballot(order, loss, failure)
                votes = _Votes(*self._reduction.finish(ballot))
        except HorovodInternalError as error:  # on every rank, because Horovod was shut down
            self._reduction.forget()
            return _Votes(failed=True, leave=True, careful=False, nonfinite=False), self.failure(error)
        if votes.nonfinite and failure is None and loss is not None and not loss.isfinite():
            failure = nonfinite_loss(self._stream.rank, loss)
        return votes, failure

    def _ballot(
        self, order: StepOrder, loss: Tensor | None, failure: Failure | None
    ) -> tuple[tuple[bool | Tensor, ...], Failure | None]:
        """What this rank votes for, in the order of :class:`_Votes`; what goes wrong in asking fails the step."""
        nonfinite: bool | Tensor = False
        careful = True
        try:
            if loss is not None:
                # fp16's scale is not in it: only scaled gradients may overflow, and the scaler skips those by itself.
                nonfinite = ~torch.isfinite(loss)
            careful = order.trial or not order.proven or self._update_may_fail()
        except BaseException as error:
            failure = failure or self.failure(error)
        return (failure is not None, nudge.newer_than(order.nudges), careful, nonfinite), failure

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
        failure = None
        try:
            undo = UpdateUndo(self._live.parameters, self._live.optimizer)
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
        return failure, undone

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
        self, start_s: float, loss: Tensor | None, failure: Failure | None, discarded: bool, last: bool
    ) -> Outcome:
        reading = self._device.reading()
        if Recorder.current and not discarded:
            self.record = Recorder.current.end()
        ledger = self.record.ledger() if self.record else None
        step_s = time.perf_counter() - start_s
        return Outcome(loss, failure, discarded, last, reading, ledger, step_s)
