"""One optimizer step without memory: what ``engine/step`` does on a rank, on fake tensors and without other ranks."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Optimizer

from ...internals.fake_internals import fake_mode, fake_weights_converted_in_place, refused_operator, stand_in
from ...memory.ledger.recorder import Recorder
from ...memory.ledger.trace import Trace
from ...memory.tensors import tensors_in
from ...shared.categories import COMMUNICATION, INPUTS
from ...shared.errors import InvalidInput, WorkloadError, text_of
from ...shared.forecast import Kernels
from ...shared.knobs.shards import ONE_RANK
from ...shared.knobs.step import NOT_OFFLOADED, UNCOMPILED, has_narrow_weights
from ...shared.knobs.update import brings_none
from ...shared.settings import Settings
from ...shared.units import DEFAULT_SEED
from ...shared.workload import Handles
from ..link.communicator import Single, used_by_thread
from ..random_state import seeded
from ..replay.recomputing import Recomputing
from ..replay.selective import Learned
from ..step import optimizers
from ..step.ambient import autocast
from ..step.buckets import ReductionConfig, carried_dtype, in_turn, into_buckets, outgoing, widened
from ..step.checks import check_precision, check_tensors, checked_loss, checked_model, checked_optimizer
from ..step.gradient_shares import GradientShares
from ..step.narrowed import narrow_weight, to_narrow
from ..step.own_loss import micro_batches
from ..step.parts import Parts, in_groups
from ..step.pieces import ASIDE, Pieces, by_pieces, until_state_waits, why_not
from ..step.reduction import GradientReduction
from ..step.sharing import Sharing
from ..step.state_aside import StateAside
from . import scratch
from .batches import Batches
from .hollow import Given, made
from .kernels import taken_for_the_cpu
from .known import Answers
from .log import DryDevice, held_by

_LOSS_SCALE = 65536.0  # torch.amp.GradScaler's first


class DryStep:
    """Takes steps of a workload under one setting of its knobs.

    Attributes:
        model: what is trained.
        phase: the part of the step under way.
    """

    def __init__(
        self,
        given: Given,
        batches: Batches,
        settings: Settings,
        kernels: Kernels,
        ranks: int = 1,
        fake: bool = True,
    ) -> None:
        """Build model and optimizer.

        Args:
            given: what is trained.
            batches: its data.
            settings: the knobs.
            kernels: what operators take inside.
            ranks: how many train together; one alone sends no gradients.
            fake: without memory; else real tensors on the CPU.

        Raises:
            WorkloadError: the workload brings no model or optimizer that can be trained.
        """
        self._batches, self._settings, self._ranks = batches, settings, ranks
        self._mode: AbstractContextManager[Any] = fake_mode() if fake else nullcontext()
        self._fake = self._knows = fake
        self.phase = "model"
        with self._inside():
            self._workload = workload = made(given)
            self.model = checked_model(workload.model())
            if not self.model.training:  # a frozen batch norm in one that trains stays as it is
                self.model.train()
            self._parts, self._recomputing = Parts(self.model, workload.loss), Recomputing(self.model, workload)
            for part in self._parts.named.values():
                check_tensors(part)
            self._optimizer = self._built()
            if settings.compile != "off":
                raise InvalidInput(UNCOMPILED)
            if settings.offload_activations == "on":
                raise InvalidInput(NOT_OFFLOADED)
            if ranks == 1 and settings.shard_optimizer == "on":
                raise InvalidInput(ONE_RANK)
            sharing = Sharing(ranks)
            sharing.apply(self._optimizer, settings, tried=True)
            self._form, self._shares = sharing.form(self._optimizer, settings), GradientShares()
            self._first_state = _copied(dict(self._optimizer.state))
            self._parts.join(self._optimizer)
            narrow = to_narrow(self._parts) if has_narrow_weights(settings) else []
            for weight in narrow:
                narrow_weight(weight)
            aside = StateAside(None) if settings.offload_optimizer == "on" else None
            if aside and (problem := why_not(self._optimizer, ASIDE)):
                raise InvalidInput(f"{problem}.")
            self._pieces, self._aside = Pieces.of(narrow, self._optimizer, aside), aside
        check_precision(settings, self._parts)
        self._params = list(in_groups(self._optimizer))
        self._device = DryDevice(self._held, scratch.inside, kernels.gemm_workspace_bytes, self._stand_in)

    @property
    def convolves(self) -> bool:
        """Return whether the latest step computed a convolution."""
        return self._device.log.convolves

    @property
    def narrows(self) -> bool:
        """Return whether all convolutions of the latest step gave 16-bit numbers."""
        return self._device.log.narrows

    @property
    def recurs(self) -> bool:
        """Return whether layers are those that cuDNN computes as a whole sequence."""
        return any(isinstance(module, nn.RNNBase) for module in self._parts.modules())

    @property
    def handles(self) -> Handles:
        """Return what knobs that free memory can take hold of."""
        logits = self._recomputing.wide_head is not None
        matrices = any(one.requires_grad for one in self._matrices)
        return Handles(len(self._recomputing.blocks), logits, matrices, self._ranks > 1)

    @property
    def _matrices(self) -> list[Tensor]:
        return optimizers.hidden_matrices(self.model, self._recomputing.head)

    @property
    def parameters(self) -> int:
        """Return how many numbers the model has."""
        return sum(param.numel() for param in self._parts.parameters())

    def trace(self, batch_size: int) -> Trace:
        """The first step of this batch size: its update makes what the optimizer has not made when it was built."""
        if self._knows:
            try:
                return self._traced(batch_size)
            except Exception:  # real tensors of whole numbers may be in the way, as where something is written over one
                self._knows = False
        return self._traced(batch_size)

    def _traced(self, batch_size: int) -> Trace:
        self._optimizer.state.clear()
        self._optimizer.state.update(_copied(self._first_state))
        if self._form.partition:
            self._form.partition.divide(self._optimizer)
        if self._aside:
            self._aside.put_away(self._optimizer)
        self._recomputing.set_checkpointing(self._settings)
        self._recomputing.set_loss_head(self._settings.loss_head)
        try:
            while True:
                with suppress(Learned), self._recording() as recorder:
                    self._take(batch_size)
                    self._recomputing.finished()
                    recorder.claim_model(self._parts.parameters(), self._optimizer.state)
                    self._zero_grad()
                    return recorder.end().trace(batch_size)
                self._recomputing.abandon()
        finally:
            self._recomputing.remove()

    @contextmanager
    def _recording(self) -> Iterator[Recorder]:
        """Inside, a step is taken without memory and recorded."""
        recorder = Recorder(self._device, *self._parts.named.values(), head=self._recomputing.wide_head)
        with self._inside(), self._recomputing.on(), recorder.watching():
            yield recorder

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Inside, tensors have no memory, and what is drawn is the same each time, as on ranks."""
        with ExitStack() as stack:
            stack.enter_context(seeded(DEFAULT_SEED))
            stack.enter_context(self._mode)
            stack.enter_context(fake_weights_converted_in_place())
            stack.enter_context(taken_for_the_cpu())
            if self._fake:
                stack.enter_context(Answers(lambda: self.phase, self._knows))
            yield

    def _built(self) -> Optimizer:
        settings, workload = self._settings, self._workload
        if settings.optimizer == "own":
            if workload.optimizer is None:
                raise InvalidInput(brings_none(workload.name))
            optimizer = checked_optimizer(workload.optimizer(self._parts.parameters()), self._parts)
            optimizers.set_implementation(optimizer, settings.optimizer_impl)
        else:
            optimizer = optimizers.build(self._parts.parameters(), settings, lambda: self._matrices)
        for group in optimizer.param_groups if not isinstance(optimizer, Adafactor) else ():  # whose default is a loop
            # torch's own choice for parameters on a GPU: torch/optim/optimizer.py, _default_to_fused_or_foreach.
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        return optimizer

    def _take(self, batch_size: int) -> None:
        self._zero_grad()
        reduction = self._cutting()
        with self._as_one_of_many() if reduction else nullcontext():
            self._forward_backward(batch_size, reduction)
            self._mark("reduction")
            if reduction is None:
                self._send()
            else:
                reduction.exchange(failed=False)
                reduction.take_back(())
        self._mark("update")
        self._update()

    @contextmanager
    def _as_one_of_many(self) -> Iterator[None]:
        """Inside, what is sent has arrived at once, from as many ranks as there are."""
        link = Single()
        link.size = self._ranks
        with used_by_thread(link):
            yield

    def _cutting(self) -> GradientReduction | None:
        """Return what lets a rank keep its share of gradients alone; nothing where each keeps all."""
        config, partition = ReductionConfig.under(self._settings), self._form.partition
        if not (config.shared and partition):
            return None
        reduction = GradientReduction(self._params, (), self._ranks, config, torch.device("cpu"), self._shares)
        reduction.begin(config, False, False, partition.kept(self._params))
        return reduction

    def _forward_backward(self, batch_size: int, reduction: GradientReduction | None) -> None:
        settings, count = self._settings, self._settings.accumulation_steps
        self._mark("data")
        total = torch.zeros((), dtype=torch.float32)
        taken = self._batches.of if self._fake else self._batches.real
        coming = (taken(batch_size) for _ in range(count))
        left = count  # by no enumerate, which would hold a batch
        for batch in micro_batches(self._workload.loss, self.model, coming, count):
            left -= 1
            if Recorder.current:
                Recorder.current.claim(INPUTS, tensors_in(batch))
            self._mark("forward")
            with autocast(settings.precision, "cpu"):
                loss = checked_loss(self._workload.loss(self.model, batch)) / count
            self._recomputing.forward_ended()
            del batch
            self._mark("backward")
            if reduction and not left:
                reduction.arm()
            (loss * _LOSS_SCALE if settings.precision == "fp16" else loss).backward()
            total += loss.detach().float()
            del loss
            self._mark("data")

    def _send(self) -> None:
        """Hold what a rank sends until it has arrived: copies of gradients that cannot travel as they are."""
        trained = [param for param in self._params if param.requires_grad and param.numel()]
        gradients = {id(param.grad) for param in trained}
        config = ReductionConfig.under(self._settings)
        buckets = into_buckets(trained, config.bucket_bytes) if self._ranks > 1 else []
        buckets.sort(key=lambda one: widened(one, config.compressed))
        for bucket, first in in_turn(buckets, config.compressed):
            if first is not None:
                first.wires = []
            bucket.wires = [list(_sent(param, config.compressed)) for param in bucket.params]
            if Recorder.current:
                made = (wire for wires in bucket.wires for wire in wires if id(wire) not in gradients)
                Recorder.current.claim(COMMUNICATION, made)

    def _update(self) -> None:
        """Unscaling works in place and clipping takes no more than a number for each weight."""
        self._device.log.on_host = not any(group.get("fused") for group in self._optimizer.param_groups)
        clip_norm, optimizer = self._settings.clip_norm, self._optimizer
        rows, norms = self._shares.of(self._params)
        step = until_state_waits(self._pieces, optimizer, by_pieces(self._pieces, optimizer, optimizer.step))
        optimizers.update_share(optimizer, None, clip_norm, step, self._form.updating, rows, norms, foreach=True)
        self._device.log.on_host = False
        self._form.after_update(self._settings, rows)

    def _stand_in(self, tensor: Tensor) -> Tensor | None:
        return stand_in(self._mode, tensor) if self._fake else None

    def _zero_grad(self) -> None:
        self._shares.begin({})
        for param in self._parts.parameters():
            param.grad = None

    def _mark(self, phase: str) -> None:
        self.phase = phase
        if Recorder.current:
            Recorder.current.mark(phase)

    def _held(self) -> int:
        """Bytes of what lives from step to step."""
        state = [value for values in self._optimizer.state.values() for value in tensors_in(values) if value.dim()]
        state = [value for value in state if not (self._aside and self._aside.waits(value))]
        buffers = [buffer for _, buffer in self._parts.named_buffers()]
        return held_by([*self._parts.parameters(), *buffers, *state])


def _copied(value: Any) -> Any:
    """The same with copies of the tensors in it; weights, the keys of an optimizer's state, stay what they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def _sent(param: Tensor, compressed: bool) -> list[Tensor]:
    """Return what is sent of one weight; a sparse gradient as a whole table, whose rows need not be known for that."""
    if param.grad is None or not param.grad.is_sparse:
        return outgoing(param, False, compressed)
    dtype = carried_dtype(param.dtype, compressed)
    return [torch.zeros_like(param, dtype=dtype), torch.zeros(param.shape[0], dtype=dtype)]


_OURS = Path(__file__).parents[2]
_ROOMS = (Path(torch.__file__).parent, _OURS / "engine", _OURS / "memory", _OURS / "internals")
_NOT_THEIRS = tuple(str(room) + os.sep for room in _ROOMS)


def refused(error: BaseException, phase: str, how: str = "run without memory") -> WorkloadError:
    """Return an exception of a dry step as a sentence."""
    operator = refused_operator(error)
    said = f"{type(error).__name__}: {text_of(error).strip().splitlines()[0] if text_of(error).strip() else ''}"
    what = f"{operator} needs the values of a tensor, which a dry run does not have" if operator else said
    return WorkloadError(f"The {phase} cannot be {how}: {what}{_place(error)}.")


def _place(error: BaseException) -> str:
    """Return the innermost line that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    if not theirs or theirs[-1].filename.startswith("<frozen"):
        return ""
    last = theirs[-1]
    code = f": {last.line.strip()}" if last.line else ""
    return f" ({Path(last.filename).name}, line {last.lineno}, in {last.name}{code})"
