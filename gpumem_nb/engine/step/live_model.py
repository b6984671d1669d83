"""The model and its optimizer, live on this rank, and the change to other settings between two steps."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...memory.device import Device
from ...memory.host_pool import HostMemory
from ...shared.errors import WorkloadError
from ...shared.knobs import KNOBS
from ...shared.knobs.update import brings_none
from ...shared.settings import OWN, Settings
from ...shared.workload import Workload
from ..link.communicator import here, same_everywhere
from ..link.signals import interruptible
from ..replay.recomputing import Recomputing
from . import checks, optimizers
from .gradient_shares import GradientShares
from .narrowed import Narrowed
from .optimizer_state import Parked, Replicas, state_of
from .parts import AllModes, Parts, in_groups, note_steps, steps_before
from .pieces import ASIDE, Pieces, why_not
from .rates import Course, Rates, named_rate
from .sharing import Sharing
from .state_aside import StateWaits

RatesMemory = Mapping[str, dict[str, Any] | None]


class LiveModel:
    """One rank's model with its optimizer, under the settings that were applied last.

    Each ``set_...`` method brings one knob to a value, notes that in :attr:`settings`, and does nothing that matters
    when the knob has the value already.

    Attributes:
        model: moved to the device and in training mode, but for what was in evaluation mode in one that was training.
        parts: the model, and what is trained besides it.
        recomputing: what of forward backward computes again; on inside of steps only.
        loss: what steps compute of the model and a micro-batch; the workload's, or what a knob puts in its place.
        optimizer: the one in use.
        own_optimizer: the one that the workload brought, in use or not.
        own_rate: the learning rate that people knew it by then.
        scheduler: what sets the own optimizer's learning rates with ``lr_schedule=own``, if the workload brought one.
        course: where training is in the schedule that the knobs name.
        sharing, shares: whether ranks share the state of the optimizer in use; what this one keeps of gradients then.
        narrowed: the weights that lie in bf16 instead of fp32.
        waits: whether the state of the optimizer in use waits in host memory.
        parameters: what is trained, in the optimizer's order.
        scaler: fp16's loss scaling, one for the whole life of the workload, whose scale survives leaving fp16.
        settings: what it is under now. In the middle of a change that failed, they say what had been applied.
        instead_of: what was asked for where autotune tries something else.
        trained_before: steps that its weights were trained for when it was made of them.
    """

    def __init__(self, workload: Workload, device: Device, ranks: int = 1) -> None:
        """Build the workload's model and optimizer; ``ranks`` train it together.

        Raises:
            WorkloadError: the workload brings no model, optimizer or scheduler that can be trained with.
        """
        self.settings, self.instead_of = Settings(), dict[str, Any]()
        self._workload, self._device = workload, device
        with interruptible():
            self.model = checks.checked_model(workload.model())
        self.loss = workload.loss
        self.parts = Parts(self.model, workload.loss)
        moved = {id(param) for param in self.parts.parameters() if param.device != device.torch_device}
        for part in self.parts.named.values():
            checks.check_tensors(part)
            part.to(device.torch_device)
        self.modes = AllModes(self.parts)
        self.own_optimizer: Optimizer | None = None
        self.own_rate = 0.0
        self.scheduler: LRScheduler | None = None
        if workload.optimizer:
            self.own_optimizer = checks.checked_optimizer(workload.optimizer(self.parts.parameters()), self.parts)
            Replicas(self.own_optimizer).move_to(device.torch_device, moved)
        if workload.scheduler:
            self.scheduler = checks.checked_scheduler(workload.scheduler(self.own_optimizer), self.own_optimizer)
        if self.own_optimizer:
            self.own_rate = named_rate(self.own_optimizer)
            self.settings = Settings(optimizer="own", learning_rate=self.own_rate)
        if self.scheduler:
            self.settings = self.settings.replace(lr_schedule=OWN)
        host = HostMemory(here().local_size)
        self.recomputing = Recomputing(self.model, workload, host)
        self.optimizer: Optimizer = self.own_optimizer or self.built(self.parts.parameters(), self.settings)
        self.parts.join(self.own_optimizer, self.optimizer)
        self._ranks = ranks
        self.course = Course(self.settings, ranks)
        self._rates = Rates(self.optimizer, self.settings.learning_rate, self.course.schedule)
        self._own_rates = self._rates if self.own_optimizer else None  # another optimizer would live on in it
        self._parked: tuple[str, Parked, Rates] | None = None  # used last, until a step was done with another one
        self._in_use: Settings | None = None  # while others are tried
        self.sharing, self.narrowed = Sharing(ranks, device.exempt), Narrowed(self.parts, device.exempt)
        self.shares, self.waits = GradientShares(), StateWaits(host, device.exempt)
        self.parameters: list[Tensor] = in_groups(self.optimizer)
        self._known = {id(param): (weakref.ref(param), param.shape) for param in self.parts.parameters()}
        self.scaler = torch.amp.GradScaler(device.torch_device.type)
        self.trained_before = steps_before(self.parts.parameters())

    def apply(self, settings: Settings) -> None:
        """Bring everything to these settings.

        Raises:
            WorkloadError: one of them is not known here or does not fit this workload. What comes before it stays
                applied, and is noted, so that going back starts from what is true.
        """
        settings.check_known()
        checks.check_precision(settings, self.parts)
        try:
            for name, knob in KNOBS.items():
                if knob.apply:
                    knob.apply(self, settings)
                self._note(**{name: getattr(settings, name)})
            self.narrowed.check(self.optimizer_in_question)
        except WorkloadError:
            self._note(**self.recomputing.applied)
            raise
        self.recomputing.settled(only_tried=self._in_use is not None)

    def set_optimizer(self, settings: Settings) -> None:
        """Update with the optimizer that these settings name, from the state that it had if that is still there.

        Raises:
            WorkloadError: the workload brings none of its own.
        """
        if settings.optimizer == self.settings.optimizer:
            return
        if settings.optimizer == "own" and self.own_optimizer is None:
            raise WorkloadError(brings_none(self._workload.name))
        if self._in_use is not None:
            return
        wanted = self.course.rate(settings)
        rate = wanted if wanted != self._rates.asked else self._rates.first or wanted
        trained, parked = self._trained(), self._parked
        if settings.optimizer == "own" and self.own_optimizer and self._own_rates:
            optimizer, rates = self.own_optimizer, self._own_rates
        elif parked and parked[0] == settings.optimizer:
            with self._device.exempt():
                parked[1].restore()
            optimizer, rates, self._parked = parked[1].optimizer, parked[2], None
            self._add(optimizer, trained)
        else:
            optimizer = self.built(trained, settings.replace(learning_rate=rate))
            # Where one is parked, no step was done with the one in use: training goes on from the state of the former.
            before = parked[0] if parked else self.settings.optimizer
            if convert := optimizers.CONVERT.get((before, settings.optimizer)):
                with self._device.exempt(), parked[1].restored() if parked else nullcontext(self.optimizer) as source:
                    self.waits.bring(source)
                    convert(optimizer, dict(source.state), self.narrowed.ids)
            rates = Rates(optimizer, wanted, self.course.schedule)
        if parked is None and self.optimizer is not self.own_optimizer:
            self._parked = (self.settings.optimizer, state_of(self.optimizer).keep(), self._rates)
        self.optimizer, self._rates = optimizer, rates
        self.parts.join(self.own_optimizer, self.optimizer)
        self._note(optimizer=settings.optimizer)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, something is tried: afterwards modules are in the modes in which cells had left them.

        The optimizer in use stays as it is: what it would be under the settings in question is only noted.
        """
        self._in_use = self.settings
        try:
            with self.modes.kept():
                yield
        finally:
            self._in_use = None

    def optimizer_in_question(self) -> Optimizer:
        """Return the one that is tried; if it is not in use, without state and in its default implementation."""
        if self._in_use is None or self.settings.optimizer == self._in_use.optimizer:
            return self.optimizer
        if self.settings.optimizer == "own" and self.own_optimizer:
            return self.own_optimizer
        return self.built(self._trained(), self.settings.replace(optimizer_impl="default"))

    def built(self, params: Iterable[Tensor], settings: Settings) -> Optimizer:
        """Return a fresh optimizer of these weights, as :func:`.optimizers.build` does."""
        return optimizers.build(params, settings, lambda: self.matrices)

    @property
    def matrices(self) -> list[Tensor]:
        """Return the matrices of the model's hidden layers."""
        return optimizers.hidden_matrices(self.model, self.recomputing.head)

    @property
    def state_would_leave(self) -> bool:
        """Return whether the state in use would go, or take another form; the own optimizer's stays beside another."""
        if self._in_use is None:
            return False
        if self.settings.optimizer != self._in_use.optimizer:
            return self.optimizer is not self.own_optimizer
        moves = self.settings.offload_optimizer != self._in_use.offload_optimizer
        return moves or self.sharing.wanted(self.settings) != self.sharing.wanted(self._in_use)

    def set_optimizer_impl(self, name: str) -> None:
        """Let torch compute the optimizer's update in this way.

        Raises:
            WorkloadError: the optimizer has no such implementation.
        """
        if self._in_use is None:
            optimizers.set_implementation(self.optimizer, name)
        else:
            optimizers.check_implementation(self.optimizer_in_question(), name)
        self._note(optimizer_impl=name)

    def set_shard_optimizer(self, settings: Settings) -> None:
        """Let this rank keep its share of the optimizer's state; :meth:`join_shards` comes before it keeps all again.

        Raises:
            WorkloadError: ranks cannot share the state of this optimizer.
        """
        self.sharing.apply(self.optimizer_in_question(), settings, tried=self._in_use is not None)
        self._note(shard_optimizer=settings.shard_optimizer)

    def join_shards(self, settings: Settings) -> None:
        """Give every rank the whole state of all optimizers, where settings ask for it; raises as its ``end``."""
        if self.sharing.joins(settings):
            name, parked, _ = self._parked or ("", None, None)
            held = (one for one in (self.own_optimizer, self.optimizer) if one)
            self.sharing.end(f"{self.settings.optimizer} {name}", held, parked)

    def set_offload_optimizer(self, settings: Settings) -> None:
        """Let the optimizer's state wait in host memory, or on the device; raises ``WorkloadError`` if it cannot."""
        if self.waits.wanted(settings) and (problem := why_not(self.optimizer_in_question(), ASIDE)):
            raise WorkloadError(problem)
        if self._in_use is None:
            self.waits.apply(settings, self.optimizer, self.own_optimizer)

    def pieces(self, optimizer: Optimizer, seed: int = 0, step: int = 0) -> Pieces | None:
        """Return by which pieces an update goes under the settings that are tried, or in use; ``None``: all at once."""
        return Pieces.of(self.narrowed.weights(), optimizer, self.waits.under(self.settings), seed, step)

    def set_learning_rate(self, settings: Settings) -> None:
        """Bring the optimizer's first group to the rate of these settings, and scale those of the others alike.

        Only if they ask for another one than before: what a cell or the own scheduler has set stays until then.
        """
        if self._in_use is not None:
            return
        self.course.follow(settings)
        self._rates.follow(self.course.rate(settings), self.course.schedule)
        self._rates.knob = settings.learning_rate
        self._note(learning_rate=settings.learning_rate)

    def relisted(self) -> bool:
        """Return whether the optimizer trains other weights than :attr:`parameters`: a cell added or removed some."""
        trained = self._trained()
        return len(trained) != len(self.parameters) or not all(map(is_, trained, self.parameters))

    def relist(self) -> None:
        """Train from now on what the optimizer has. A collective. Raises ``WorkloadError`` if ranks have other ones."""
        trained = self._trained()
        shapes = [(tuple(param.shape), str(param.dtype), param.requires_grad) for param in trained]
        if not same_everywhere(zlib.crc32(repr(shapes).encode()), "weights"):
            raise WorkloadError(
                "the optimizer trains other weights on one rank than on another. Run the cell that changed it on all "
                "ranks, or attach the model again."
            )
        self.parameters = trained
        self._add(self.optimizer, trained)
        state_of(self.optimizer).follow_groups()

    def refuse_strangers(self) -> None:
        """Weights that came into the model meanwhile must be trained, or frozen; others must have their old shapes.

        Blocks and a head that came are made to do as the knobs say.

        Raises:
            WorkloadError: naming the first that no optimizer has, one of another shape, a ``SyncBatchNorm``, or blocks
                or a head that do not go with the knobs.
        """
        for part in self.parts.named.values():
            checks.check_modules(part)
        checks.check_strangers(self.parts, self._known, set(map(id, self._trained())))
        self.narrowed.meet_new()
        self.recomputing.meet_new(self.settings)

    def sparse_places(self) -> list[int]:
        """Return the places in :attr:`parameters` of tables whose gradients are sparse."""
        tables = {id(getattr(one, "weight", None)) for one in self.parts.modules() if getattr(one, "sparse", 0) is True}
        return [place for place, param in enumerate(self.parameters) if id(param) in tables]

    def _trained(self) -> list[Tensor]:
        trained = in_groups(self.optimizer)
        if self.own_optimizer is None or self.optimizer is self.own_optimizer:
            return trained
        known = set(map(id, trained))
        return trained + [param for param in in_groups(self.own_optimizer) if id(param) not in known]

    @property
    def learning_rate(self) -> float:
        """The rate of the first group as it is now, however it was set."""
        return self._rates.first

    @property
    def asked_rate(self) -> float:
        """The rate that the knobs asked for last; a cell or the own scheduler may have set another one since."""
        return self._rates.asked

    def rates_were_given(self) -> None:
        """All ranks have the rates of rank 0 now, whatever cells had set on some of them."""
        self._rates.forget()

    def step_counted(self, skipped: bool) -> None:
        """A step was done with the optimizer in use: nothing from before it comes back, and the schedule goes on.

        One whose update the loss scaler ``skipped`` is no step of the schedule; the own scheduler goes on with it, as
        in a loop that calls both.
        """
        self._parked = None
        self.narrowed.settle()
        self._rates.settle()
        self.course.step_counted(skipped)
        if self.settings.lr_schedule != OWN:
            self._rates.advance(self.course.rate(self.settings))
        elif self.scheduler and self.optimizer is self.own_optimizer:
            self.scheduler.step()

    def replace_scaler(self, state: dict[str, Any]) -> None:
        """Go on with a new loss scaler in this state: one that was left half way believes that it has unscaled."""
        self.scaler = torch.amp.GradScaler(self._device.torch_device.type)
        self.scaler.load_state_dict(state)

    @property
    def rates_memory(self) -> RatesMemory:
        """Return what the rates of the optimizer in use, and those of the workload's own, go on from."""
        return {"in use": self._rates.memory, "own": self._own_rates.memory if self._own_rates else None}

    def go_on_with(self, optimizer: Optimizer, settings: Settings, course: Course, memory: RatesMemory) -> None:
        """Weights were put back to an earlier moment: ``optimizer`` is the one of that moment, under ``settings``.

        ``course`` is where the schedule was then, on as many ranks as there were; ``memory`` is :attr:`rates_memory` of
        that moment, as far as it is known.
        """
        self.optimizer, self._parked = optimizer, None
        self.sharing.joins(settings)  # which takes note of them
        self.narrowed.settle()
        self.parts.join(self.own_optimizer, optimizer)
        self._rates = Rates(optimizer, course.rate(settings), course.schedule)
        self._rates.knob = settings.learning_rate
        self.course = Course(settings, self._ranks, course.done)
        if in_use := memory.get("in use"):
            self._rates.remember(in_use)
        if optimizer is self.own_optimizer:
            self._own_rates = self._rates
        elif self._own_rates and (own := memory.get("own")):
            self._own_rates.remember(own)
        names = ("optimizer", "optimizer_impl", "shard_optimizer", "learning_rate")
        self._note(**{name: getattr(settings, name) for name in names})

    def close(self, steps: int) -> str:
        """Leave the model as it was handed over: no hooks, no gradients, no shards, no rate of a schedule's middle.

        Its weights have ``steps`` behind them, those of a state that they were resumed from included. Ranks that shared
        a state do it together. Returns what could not be left so, in words.
        """
        self.recomputing.remove()
        self.zero_grad()  # which makes room for a whole state
        lost = ""
        if self.sharing.joins(Settings()) and self.own_optimizer:  # the state of another one goes with it
            with self._device.exempt():
                lost = self.sharing.hand_back(self.own_optimizer)
        self.waits.end(self.own_optimizer)
        self.narrowed.bring(False)
        if self._own_rates:
            self._own_rates.leave()
        note_steps(self.parts.parameters(), steps)
        return lost

    def zero_grad(self, weights: list[Tensor] | None = None) -> None:
        """Let go of all gradients, also of those that a cell has left; ``weights`` are all of the modules, if known."""
        self.shares.begin({})
        self.parts.zero_grad(self.parameters, weights)

    def _note(self, **applied: Any) -> None:
        self.settings = self.settings.replace(**applied)

    def _add(self, optimizer: Optimizer, trained: Iterable[Tensor]) -> None:
        """Let an optimizer by a knob's name train these too, in its one group, at the rate of the others."""
        known = set(map(id, in_groups(optimizer)))
        optimizer.param_groups[0]["params"] += [param for param in trained if id(param) not in known]
        optimizers.tell_matrices(optimizer, self.matrices)
