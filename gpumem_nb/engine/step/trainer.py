"""The trainer: one rank's model, optimizer and data, trained in chunks under changing settings."""

from __future__ import annotations

import dataclasses
import gc
import time
import zlib
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn
from torch.optim import Optimizer

from ...memory.device import Device
from ...memory.leaks.watch import LeakWatch
from ...memory.ledger.account import Record
from ...memory.ledger.recorder import Recorder
from ...memory.tensors import tensors_in
from ...shared.categories import INPUTS
from ...shared.errors import WorkloadError
from ...shared.knobs import KNOBS
from ...shared.messages import Chunk, ChunkReply, Failure, Sample, Timeline, WorkloadInfo
from ...shared.settings import Settings
from ...shared.workload import Workload
from ..together import collectives, nudge
from ..together.agreement import any_rank, same_everywhere
from ..together.interrupts import interruptible
from . import optimizers
from .ambient import Ambient
from .blame import failure_of
from .checkpointing import Checkpointing, find_blocks
from .data import ShardedStream, to_device
from .precision import autocast
from .reduction import GradientReduction
from .undo import ForwardUndo, KeptState, UpdateUndo

FIRST_LEDGERS = 2  # under new settings: the optimizer's state is there from the second step on
# Of the parameters: more than any of torch's optimizers allocates in an update, once it has its state.
UPDATE_COPIES = 3


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How one step ended on this rank. ``discarded`` and ``last`` are the same on every rank, ``failure`` its own."""

    sample: Sample
    loss: Tensor | None
    failure: Failure | None
    discarded: bool
    last: bool

    def sample_with_loss(self) -> Sample:
        """The sample, complete. Reading a loss waits for the device, so it is done once a chunk."""
        return dataclasses.replace(self.sample, loss=None if self.loss is None else self.loss.item())


@dataclass(frozen=True, slots=True)
class _Votes:
    """What any rank voted for: it failed; it was nudged; its update may fail; its loss is not a finite number."""

    failed: bool
    leave: bool
    careful: bool
    nonfinite: bool


class Trainer:
    """Trains one workload on this rank, in step with the trainers of the other ranks once :meth:`join` was called.

    Attributes:
        model, optimizer, stream: what is being trained, live; cells that run on the rank may look at them.
        own_optimizer: the one that the workload brought, in use or not.
        parameters: what is trained, in the optimizer's order.
        scaler: fp16's loss scaling.
        settings: what the last step ran under.
        steps: optimizer steps done.
        began_s: when that step began, on the clock of ``time.monotonic``.
    """

    def __init__(self, workload: Workload, stream: ShardedStream, device: Device, started_s: float) -> None:
        self.workload = workload
        self.stream = stream
        self.device = device
        self.settings = Settings()
        self.steps = 0
        self._phase = "settings"
        self.began_s = time.monotonic()
        self._started_s = started_s
        self._settings_id = -1
        self._failed_id = -1
        self._proven_id = -1  # under which a step was finished
        self._flipped = False
        self._looked_into = 0  # steps under these settings
        self._record: Record | None = None
        torch.manual_seed(0)
        with interruptible():
            self.model = _checked_model(workload.model()).to(device.torch_device).train()
        torch.manual_seed(1 + stream.rank)
        self.own_optimizer = workload.optimizer(self.model.parameters()) if workload.optimizer else None
        if self.own_optimizer:
            own_rate = self.own_optimizer.param_groups[0]["lr"]
            self.settings = Settings(optimizer="own", learning_rate=own_rate)
        self.optimizer: Optimizer = self.own_optimizer or optimizers.build(self.model.parameters(), self.settings)
        self._parked: tuple[str, KeptState] | None = None  # used last, until a step was done with another one
        self.parameters: list[Tensor] = [param for group in self.optimizer.param_groups for param in group["params"]]
        self._param_bytes = sum(param.nbytes for param in self.parameters)
        self._reduction = GradientReduction(self.parameters)
        known = {"model": self.model, "dataset": stream.dataset, "workload": workload}
        self._leaks = LeakWatch(stream.rank, device.torch_device, known)
        self._checkpointing: Checkpointing | None = None
        # One scaler for the whole life of the workload: leaving fp16 and coming back keeps its scale.
        self.scaler = torch.amp.GradScaler(device.torch_device.type)

    def join(self) -> None:
        """Begin with the weights of rank 0; all ranks call it together."""
        shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self.model.state_dict().items()]
        if not same_everywhere(zlib.crc32(repr(shapes).encode()), "model"):
            raise WorkloadError(
                "The ranks hold different models: names, shapes or types of their weights differ. Define the model in "
                "the same way on all ranks."
            )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def info(self) -> WorkloadInfo:
        """Sizes of what was loaded."""
        own = self.own_optimizer
        params = list(self.model.parameters())
        return WorkloadInfo(
            name=self.workload.name,
            parameters=sum(param.numel() for param in params),
            parameter_bytes=sum(param.nbytes for param in params),
            dataset_len=self.stream.length,
            blocks=len(self._blocks()),
            own_optimizer=type(own).__name__ if own else None,
            own_learning_rate=own.param_groups[0]["lr"] if own else None,
        )

    def go_on_from(self, steps: int, settings: Settings, optimizer: Optimizer) -> None:
        """Weights were put back to what they were after ``steps``, and ``optimizer`` is the one of that moment."""
        self.steps, self.optimizer = steps, optimizer
        own = {name: getattr(settings, name) for name in ("optimizer", "optimizer_impl", "learning_rate")}
        self.settings = self.settings.replace(**own)
        self._settings_id = self._failed_id = self._proven_id = -1
        self._parked, self._flipped = None, False

    def close(self) -> None:
        """Leave the model as it was handed over: no hooks, no gradients."""
        self._reduction.remove()
        if self._checkpointing:
            self._checkpointing.remove()
        self.model.zero_grad()

    @property
    def phase(self) -> str:
        """The part of the step under way."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if Recorder.current:
            Recorder.current.mark(phase)

    def run(self, chunk: Chunk) -> ChunkReply:
        """Train one chunk.

        Ends early, on every rank at the same step, when any rank could not finish a step or was nudged.
        """
        if chunk.settings_id == self._failed_id:
            return ChunkReply(self.stream.rank, (), self.device.reading())
        if chunk.trial:
            return self._try_out(chunk)
        nudge.catch_up(chunk.nudges)
        failure = self._apply(chunk)
        self._leaks.chunk_begins(self.device.reading().live_bytes)
        outcomes: list[_Outcome] = []
        for _ in range(chunk.steps):
            outcomes.append(self._step(failure, chunk))
            self._leaks.step_ended(outcomes[-1].sample, losses=len(outcomes))
            failure = outcomes[-1].failure
            if outcomes[-1].discarded:
                self._failed_id = chunk.settings_id
            if outcomes[-1].last:
                break
        samples = tuple(outcome.sample_with_loss() for outcome in outcomes)
        return ChunkReply(self.stream.rank, samples, self.device.reading(), failure, leaks=self._leaks.take())

    def record(self) -> Timeline | None:
        """One step, looked into allocation by allocation and undone on all ranks; ``None`` when another rank failed.

        Raises:
            WorkloadError: this rank could not finish it.
        """
        flipped = self._flipped
        outcome = self._step(None, Chunk(self.settings, self._settings_id, 1, trial=True, ledger_steps=1))
        self._flipped = flipped
        if outcome.failure:
            raise WorkloadError(f"The step could not be recorded: {outcome.failure.message}")
        ledger, record, self._record = outcome.sample.ledger, self._record, None
        return record.timeline(self.stream.rank, self.steps + 1, ledger) if ledger and record else None

    def _try_out(self, chunk: Chunk) -> ChunkReply:
        """One step under other settings, undone on all ranks: does it fit, and what is its peak?"""
        settings, settings_id = self.settings, self._settings_id
        flipped = self._flipped
        outcome = self._step(self._apply(chunk), chunk)
        self._settings_id = -1  # whatever of it could be applied is taken back
        self._apply(Chunk(settings, settings_id, 0))
        self._flipped = flipped
        return ChunkReply(self.stream.rank, (outcome.sample,), self.device.reading(), outcome.failure)

    def _step(self, failure: Failure | None, chunk: Chunk) -> _Outcome:
        """One step and what it measured. A failure to apply the settings fails it from the start, on all ranks."""
        self.device.reset_peak()
        start_s = time.perf_counter()
        self.began_s = time.monotonic()
        self._record = None
        if failure or not self._looks_into(chunk):
            return self._attempt(failure, chunk, start_s)
        with Recorder(self.device, self.model).watching():
            return self._attempt(failure, chunk, start_s)

    def _looks_into(self, chunk: Chunk) -> bool:
        """Whether this step gets a ledger: some regularly, and the first ones under new settings."""
        first = self._looked_into < FIRST_LEDGERS
        return chunk.ledger_steps > 0 and (first or chunk.trial or self.steps % chunk.ledger_steps == 0)

    def _attempt(self, failure: Failure | None, chunk: Chunk, start_s: float) -> _Outcome:
        before, ambient = None, Ambient()
        loss = None
        if failure is None:
            self.phase = "forward"
            try:
                collectives.check()
                before = ForwardUndo(self.model)
                with self.device.step_scope(), self._leaks.step():
                    loss = self._forward_backward()
            except BaseException as error:  # a rank that left without a vote would keep the others waiting
                failure = self._failure(error)
                if self._checkpointing:
                    self._checkpointing.abandon()
                with self.device.exempt():
                    ambient.restore()
        votes, failure = self._reduce(failure, loss, chunk)
        if votes.nonfinite and failure is None and loss is not None and not loss.isfinite():
            failure = self._nonfinite(loss)
        discarded = votes.failed or votes.nonfinite
        if not discarded and votes.careful:
            failure, discarded = self._update_or_undo(chunk.trial)
        elif not discarded:
            self._update()
        self.model.zero_grad()
        if discarded:
            if before:
                before.undo()
            gc.collect()  # what was under way may hang together in circles, with activations among them
            event = failure.kind if failure else "trial" if chunk.trial else "discarded"
            return _Outcome(self._sample(start_s, event), loss, failure, True, True)
        self.stream.advance(self.settings.batch_size, self.settings.accumulation_steps)
        self.steps += 1
        self._proven_id, self._parked = self._settings_id, None
        self._looked_into += Recorder.current is not None
        event = "flip" if self._flipped else ""
        self._flipped = False
        return _Outcome(self._sample(start_s, event), loss, None, False, votes.leave)

    def _forward_backward(self) -> Tensor:
        """Accumulate the gradients of all micro-batches of this step; returns the mean loss."""
        settings = self.settings
        total = torch.zeros((), device=self.device.torch_device)
        self.phase = "data"
        with interruptible():
            batches = self.stream.micro_batches(settings.batch_size, settings.accumulation_steps)
            for index, batch in enumerate(batches):
                batch = to_device(batch, self.device.torch_device)
                if Recorder.current:
                    Recorder.current.claim(INPUTS, tensors_in(batch))
                self.phase = "forward"
                with autocast(settings.precision, self.device.torch_device.type):
                    loss = _checked_loss(self.workload.loss(self.model, batch)) / settings.accumulation_steps
                del batch
                self.phase, self._reduction.latest = "backward", None
                if index == settings.accumulation_steps - 1:
                    self._reduction.arm()
                (self.scaler.scale(loss) if settings.precision == "fp16" else loss).backward()
                total += loss.detach().float()
                self.phase = "data"
        return total

    def _reduce(self, failure: Failure | None, loss: Tensor | None, chunk: Chunk) -> tuple[_Votes, Failure | None]:
        """Average the gradients over all ranks, and learn what any of them votes for; this rank may fail in it."""
        self.phase = "reduction"
        # fp16's scale is not in it: only scaled gradients may overflow, and the scaler skips those by itself.
        nonfinite = False if loss is None else ~torch.isfinite(loss)
        careful = chunk.trial or self._update_may_fail()
        votes = (failure is not None, nudge.newer_than(chunk.nudges), careful, nonfinite)
        try:
            # A failed rank has room for the zeros it sends: whatever its step held is gone by now.
            with self.device.exempt():
                return _Votes(*self._reduction.finish(votes)), failure
        except HorovodInternalError as error:  # on every rank, because Horovod was shut down
            self._reduction.forget()
            return _Votes(failed=True, leave=True, careful=False, nonfinite=False), self._failure(error)

    def _update_may_fail(self) -> bool:
        """Whether this update could end half way: on its first try, short of memory, or in somebody's own code."""
        if self._settings_id != self._proven_id or not optimizers.from_torch(self.optimizer):
            return True
        room = self.device.room()
        return room is None or room < UPDATE_COPIES * self._param_bytes

    def _update_or_undo(self, trial: bool) -> tuple[Failure | None, bool]:
        """Update, and undo it on all ranks if one cannot, or for a trial; returns this rank's failure and if undone."""
        self.phase = "update"
        undo, scaler_state = None, self.scaler.state_dict()
        failure = None
        try:
            undo = UpdateUndo(self.parameters, self.optimizer)
            with self.device.step_scope():
                self._update()
            if trial and Recorder.current:
                self._record = Recorder.current.end()  # undoing is no part of a step
        except BaseException as error:
            failure = self._failure(error)
        try:
            undone = any_rank(failure is not None, "update") or trial
        except HorovodInternalError as error:
            failure, undone = self._failure(error), True
        if undone:
            if undo:
                undo.undo()
            # An update that ended half way leaves the scaler believing that it has unscaled already.
            self.scaler = torch.amp.GradScaler(self.device.torch_device.type)
            self.scaler.load_state_dict(scaler_state)
        return failure, undone

    def _update(self) -> None:
        """Unscale, clip, update: in this order, because clipping is about true gradients."""
        self.phase = "update"
        scaled = self.settings.precision == "fp16"
        if scaled:
            self.scaler.unscale_(self.optimizer)
        if self.settings.clip_norm is not None:
            optimizers.clip_gradients(self.optimizer, self.settings.clip_norm)
        if scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if Recorder.current:
            Recorder.current.claim_model(self.parameters, self.optimizer.state)

    def _apply(self, chunk: Chunk) -> Failure | None:
        """Switch to the chunk's settings, or say why it cannot be done."""
        self.phase = "settings"
        if chunk.settings_id == self._settings_id:
            return None
        wanted, changed = chunk.settings, chunk.settings.changed_from(self.settings)
        try:
            wanted.check_known()
            for name, knob in KNOBS.items():
                if knob.apply:
                    knob.apply(self, wanted)
                # What has been applied is noted at once: if the rest fails, going back starts from what is true.
                self.settings = self.settings.replace(**{name: getattr(wanted, name)})
        except BaseException as error:
            return self._failure(error)
        self.settings, self._settings_id = wanted, chunk.settings_id
        self._flipped, self._looked_into = self._flipped or bool(changed), 0
        return None

    def set_checkpointing(self, mode: str) -> None:
        """Checkpoint activations in this mode from the next step on."""
        if mode == self.settings.checkpointing:
            return
        if self._checkpointing:
            self._checkpointing.remove()
            self._checkpointing = None
        if mode != "none":
            self._checkpointing = Checkpointing(self.model, self._blocks(), mode)

    def set_optimizer(self, settings: Settings) -> None:
        """Train with the optimizer that these settings name; the one before is kept until a step was done."""
        if settings.optimizer == self.settings.optimizer:
            return
        if settings.optimizer == "own" and self.own_optimizer is None:
            raise WorkloadError(
                f"{self.workload.name} brings no optimizer of its own. Use optimizer=sgd, momentum, adam or adamw."
            )
        if self._parked is None and self.optimizer is not self.own_optimizer:
            self._parked = (self.settings.optimizer, KeptState(self.optimizer, release=True))
        if settings.optimizer == "own" and self.own_optimizer:
            self.optimizer = self.own_optimizer
        elif self._parked and self._parked[0] == settings.optimizer:
            with self.device.exempt():
                self._parked[1].restore()
            self.optimizer, self._parked = self._parked[1].optimizer, None
        else:
            self.optimizer = optimizers.build(self.parameters, settings)

    def set_optimizer_impl(self, name: str) -> None:
        """Compute the same update in another way; the state stays."""
        optimizers.set_implementation(self.optimizer, name)

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the first parameter group, and scale those of the others by the same factor."""
        if rate != self.optimizer.param_groups[0]["lr"]:
            optimizers.set_learning_rate(self.optimizer, rate)

    def _blocks(self) -> list[nn.Module]:
        return self.workload.blocks(self.model) if self.workload.blocks else find_blocks(self.model)

    def _failure(self, error: BaseException) -> Failure:
        return failure_of(error, self.stream.rank, self.phase, self.model, self._reduction.latest, self.device)

    def _nonfinite(self, loss: Tensor) -> Failure:
        return Failure(
            self.stream.rank,
            "error",
            "forward",
            f"the loss became {loss.item()}. Look at its data on this rank, lower learning_rate or set clip_norm",
        )

    def _sample(self, start_s: float, event: str) -> Sample:
        reading, ledger = self.device.reading(), None
        if Recorder.current and event in ("", "flip"):
            self._record = Recorder.current.end()
        if self._record:
            ledger = self._record.ledger()
        step_s = time.perf_counter() - start_s
        return Sample(
            rank=self.stream.rank,
            step=self.steps,
            time_s=time.time() - self._started_s,
            loss=None,
            step_s=step_s,
            samples_per_s=self.settings.samples_per_rank / step_s,
            live_bytes=reading.live_bytes,
            live_peak_bytes=reading.live_peak_bytes,
            reserved_bytes=reading.reserved_bytes,
            reserved_peak_bytes=reading.reserved_peak_bytes,
            device_used_bytes=reading.device_used_bytes,
            settings_id=self._settings_id,
            event=event,
            ledger=ledger,
        )


def _checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"The model must be a torch.nn.Module; this is a {type(model).__name__}.")
    if not any(param.requires_grad for param in model.parameters()):
        raise WorkloadError("The model has no trainable parameters: every requires_grad is False.")
    return model


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise WorkloadError(f"The loss must return one number as a tensor; it returned a {type(loss).__name__}.")
    if loss.numel() != 1:
        raise WorkloadError(
            f"The loss must return one number (a scalar tensor); it returned shape {tuple(loss.shape)}. "
            "Take its mean, for example: loss.mean()."
        )
    if loss.grad_fn is None:
        raise WorkloadError(
            "The loss does not depend on the model's weights, so there is nothing to train. "
            "Remove detach(), item() or no_grad() between model and loss."
        )
    return loss
