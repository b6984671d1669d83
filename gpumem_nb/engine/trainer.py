"""The trainer: one rank's model, optimizer and data, trained in chunks under changing settings."""

from __future__ import annotations

import dataclasses
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import WorkloadError
from ..memory.device import Device
from ..sample import Chunk, ChunkReply, Failure, Sample, WorkloadInfo
from ..settings import Settings
from ..workload import Workload
from . import nudge, optimizers
from .checkpointing import Checkpointing, find_blocks
from .data import ShardedStream, to_device
from .interrupts import interruptible
from .precision import autocast
from .reduction import GradientReduction


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


class Trainer:
    """Trains one workload on this rank, in step with the trainers of the other ranks.

    Attributes:
        model, optimizer, stream: what is being trained, live; cells that run on the rank may look at them.
        settings: what the last step ran under.
        steps: optimizer steps done.
        phase: the part of the step under way, for messages.
    """

    def __init__(self, workload: Workload, stream: ShardedStream, device: Device, started_s: float) -> None:
        self.workload = workload
        self.stream = stream
        self.device = device
        self.settings = Settings()
        self.steps = 0
        self.phase = "settings"
        self._started_s = started_s
        self._settings_id = -1
        self._failed_id = -1
        self._flipped = False
        torch.manual_seed(0)
        with interruptible():
            self.model = _checked_model(workload.model()).to(device.torch_device).train()
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        torch.manual_seed(1 + hvd.rank())
        self._own_optimizer = workload.optimizer(self.model.parameters()) if workload.optimizer else None
        if self._own_optimizer:
            own_rate = self._own_optimizer.param_groups[0]["lr"]
            self.settings = Settings(optimizer="own", learning_rate=own_rate)
        self.optimizer: Optimizer = self._own_optimizer or optimizers.build(self.model.parameters(), self.settings)
        self._params = [param for group in self.optimizer.param_groups for param in group["params"]]
        self._reduction = GradientReduction(self._params)
        self._checkpointing: Checkpointing | None = None
        # One scaler for the whole life of the workload: leaving fp16 and coming back keeps its scale.
        self._scaler = torch.amp.GradScaler(device.torch_device.type)

    def info(self) -> WorkloadInfo:
        """Sizes of what was loaded."""
        own = self._own_optimizer
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

    def close(self) -> None:
        """Leave the model as it was handed over: no hooks, no gradients."""
        self._reduction.remove()
        if self._checkpointing:
            self._checkpointing.remove()
        self.model.zero_grad()

    def run(self, chunk: Chunk) -> ChunkReply:
        """Train one chunk.

        Ends early, on every rank at the same step, when any rank could not finish a step or was nudged.
        """
        if chunk.settings_id == self._failed_id:
            return ChunkReply(hvd.rank(), (), self.device.reading(), skipped=True)
        nudge.catch_up(chunk.nudges)
        failure = self._apply(chunk)
        outcomes: list[_Outcome] = []
        for _ in range(chunk.steps):
            outcomes.append(self._step(failure, chunk.nudges))
            failure = outcomes[-1].failure
            if outcomes[-1].discarded:
                self._failed_id = chunk.settings_id
            if outcomes[-1].last:
                break
        samples = tuple(outcome.sample_with_loss() for outcome in outcomes)
        return ChunkReply(hvd.rank(), samples, self.device.reading(), failure)

    def _step(self, failure: Failure | None, nudges: int) -> _Outcome:
        """One step and what it measured. A failure to apply the settings fails it from the start, on all ranks."""
        self.device.reset_peak()
        start_s = time.perf_counter()
        loss = None
        if failure is None:
            try:
                with self.device.step_scope():
                    loss = self._forward_backward()
            except (Exception, KeyboardInterrupt) as error:
                failure = self._failure(error)
        discarded, last = self._reduce(failure, nudges)
        if not discarded:
            try:
                with self.device.step_scope():
                    self._update()
            except Exception as error:
                failure, discarded = self._failure(error), True
                self._renew_scaler()
        self.model.zero_grad()
        if discarded:
            return _Outcome(self._sample(start_s, failure.kind if failure else "discarded"), loss, failure, True, True)
        self.stream.advance(self.settings.batch_size, self.settings.accumulation_steps)
        self.steps += 1
        event = "flip" if self._flipped else ""
        self._flipped = False
        return _Outcome(self._sample(start_s, event), loss, None, False, last)

    def _forward_backward(self) -> Tensor:
        """Accumulate the gradients of all micro-batches of this step; returns the mean loss."""
        settings = self.settings
        total = torch.zeros((), device=self.device.torch_device)
        self.phase = "data"
        with interruptible():
            batches = self.stream.micro_batches(settings.batch_size, settings.accumulation_steps)
            for index, batch in enumerate(batches):
                batch = to_device(batch, self.device.torch_device)
                self.phase = "forward"
                with autocast(settings.precision, self.device.torch_device.type):
                    loss = _checked_loss(self.workload.loss(self.model, batch)) / settings.accumulation_steps
                del batch
                self.phase = "backward"
                if index == settings.accumulation_steps - 1:
                    self._reduction.arm()
                (self._scaler.scale(loss) if settings.precision == "fp16" else loss).backward()
                total += loss.detach().float()
                self.phase = "data"
        return total

    def _reduce(self, failure: Failure | None, nudges: int) -> list[bool]:
        """Average the gradients over all ranks; returns whether any rank failed, and whether any was nudged."""
        self.phase = "reduction"
        # A failed rank has room for the zeros it sends: whatever its step held is gone by now.
        with self.device.exempt() if failure else nullcontext():
            return self._reduction.finish(failure is not None, nudge.newer_than(nudges))

    def _update(self) -> None:
        """Unscale, clip, update: in this order, because clipping is about true gradients."""
        self.phase = "update"
        scaled = self.settings.precision == "fp16"
        if scaled:
            self._scaler.unscale_(self.optimizer)
        if self.settings.clip_norm is not None:
            optimizers.clip_gradients(self.optimizer, self.settings.clip_norm)
        if scaled:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self.optimizer.step()

    def _renew_scaler(self) -> None:
        """An update that ended half way leaves the scaler believing that it has unscaled already."""
        state = self._scaler.state_dict()
        self._scaler = torch.amp.GradScaler(self.device.torch_device.type)
        self._scaler.load_state_dict(state)

    def _apply(self, chunk: Chunk) -> Failure | None:
        """Switch to the chunk's settings, or say why it cannot be done."""
        self.phase = "settings"
        if chunk.settings_id == self._settings_id:
            return None
        wanted, changed = chunk.settings, chunk.settings.changed_from(self.settings)
        try:
            if "checkpointing" in changed:
                self._set_checkpointing(wanted.checkpointing)
            # What has been applied is noted at once: if the rest fails, going back starts from what is true.
            self.settings = self.settings.replace(checkpointing=wanted.checkpointing)
            if "optimizer" in changed:
                self._set_optimizer(wanted)
            self.settings = self.settings.replace(optimizer=wanted.optimizer)
            optimizers.set_implementation(self.optimizer, wanted.optimizer_impl)
            if wanted.learning_rate != self.optimizer.param_groups[0]["lr"]:
                optimizers.set_learning_rate(self.optimizer, wanted.learning_rate)
        except Exception as error:
            return self._failure(error)
        self.settings, self._settings_id = wanted, chunk.settings_id
        self._flipped = self._flipped or bool(changed)
        return None

    def _set_checkpointing(self, mode: str) -> None:
        if self._checkpointing:
            self._checkpointing.remove()
            self._checkpointing = None
        if mode != "none":
            self._checkpointing = Checkpointing(self.model, self._blocks(), mode)

    def _set_optimizer(self, settings: Settings) -> None:
        if settings.optimizer != "own":
            self.optimizer = optimizers.build(self._params, settings)
        elif self._own_optimizer:
            self.optimizer = self._own_optimizer
        else:
            raise WorkloadError(
                f"{self.workload.name} brings no optimizer of its own. Use optimizer=sgd, momentum, adam or adamw."
            )

    def _blocks(self) -> list[nn.Module]:
        return self.workload.blocks(self.model) if self.workload.blocks else find_blocks(self.model)

    def _failure(self, error: BaseException | None) -> Failure:
        """Describe an exception and let go of what it keeps alive: its traceback's frames hold activations."""
        oom = isinstance(error, torch.OutOfMemoryError)
        kind = "oom" if oom else "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
        message = str(error) if oom or isinstance(error, WorkloadError) else f"{type(error).__name__}: {error}"
        text = "".join(traceback.format_exception(error))
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            error = error.__context__
        return Failure(hvd.rank(), kind, self.phase, message, text)

    def _sample(self, start_s: float, event: str) -> Sample:
        reading = self.device.reading()
        step_s = time.perf_counter() - start_s
        return Sample(
            rank=hvd.rank(),
            step=self.steps,
            time_s=time.time() - self._started_s,
            loss=None,
            step_s=step_s,
            samples_per_s=self.settings.samples_per_rank / step_s,
            live_bytes=reading.live,
            live_peak_bytes=reading.live_peak,
            reserved_bytes=reading.reserved,
            reserved_peak_bytes=reading.reserved_peak,
            device_used_bytes=reading.device_used,
            settings_id=self._settings_id,
            event=event,
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
