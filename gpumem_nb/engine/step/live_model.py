"""What is trained, live on this rank, and how it is brought to other settings between two steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...memory.device import Device
from ...shared.errors import WorkloadError
from ...shared.knobs import KNOBS
from ...shared.knobs.optimizer import brings_none
from ...shared.settings import Settings
from ...shared.workload import Workload
from ..together.interrupts import interruptible
from . import optimizers
from .checkpointing import Checkpointing, find_blocks
from .checks import checked_model
from .parts import Parts, in_groups
from .undo import KeptState


class LiveModel:
    """One rank's model with its optimizer, under the settings that were applied last.

    Each ``set_...`` method brings one knob to a value, notes that in :attr:`settings`, and does nothing that matters
    when the knob has the value already.

    Attributes:
        model: moved to the device and in training mode.
        parts: the model, and what is trained besides it.
        optimizer: the one in use.
        own_optimizer: the one that the workload brought, in use or not.
        parameters: what is trained, in the optimizer's order.
        scaler: fp16's loss scaling. One for the whole life of the workload: leaving fp16 and coming back keeps its
            scale.
        settings: what it is under now. In the middle of a change that failed, they say what had been applied.
    """

    def __init__(self, workload: Workload, device: Device, rank: int) -> None:
        """Build the workload's model and optimizer.

        Raises:
            WorkloadError: the workload brings no model that can be trained.
        """
        self.settings = Settings()
        self._workload = workload
        self._device = device
        torch.manual_seed(0)
        with interruptible():
            self.model = checked_model(workload.model())
        self.parts = Parts(self.model, workload.loss)
        for part in self.parts.named.values():
            part.to(device.torch_device).train()
        torch.manual_seed(1 + rank)
        self.own_optimizer = workload.optimizer(self.parts.parameters()) if workload.optimizer else None
        if self.own_optimizer:
            own_rate = self.own_optimizer.param_groups[0]["lr"]
            self.settings = Settings(optimizer="own", learning_rate=own_rate)
        self.parts.join(self.own_optimizer)
        self.optimizer: Optimizer = self.own_optimizer or optimizers.build(self.parts.parameters(), self.settings)
        self._parked: tuple[str, KeptState] | None = None  # used last, until a step was done with another one
        self.parameters: list[Tensor] = list(in_groups(self.optimizer))
        self._checkpointing: Checkpointing | None = None
        self.scaler = torch.amp.GradScaler(device.torch_device.type)

    @property
    def blocks(self) -> list[nn.Module]:
        """What checkpointing wraps, in the order in which forward calls them."""
        return self._workload.blocks(self.model) if self._workload.blocks else find_blocks(self.model)

    def apply(self, settings: Settings) -> None:
        """Bring everything to these settings.

        Raises:
            WorkloadError: one of them is not known here or does not fit this workload. What comes before it stays
                applied, and is noted, so that going back starts from what is true.
        """
        settings.check_known()
        for name, knob in KNOBS.items():
            if knob.apply:
                knob.apply(self, settings)
            self._note(**{name: getattr(settings, name)})

    def set_checkpointing(self, mode: str) -> None:
        """Recompute activations in backward instead of keeping them, in segments as the mode says.

        Raises:
            WorkloadError: the model has no blocks.
        """
        if mode == self.settings.checkpointing:
            return
        if self._checkpointing:
            self._checkpointing.remove()
            self._checkpointing = None
            self._note(checkpointing="none")
        if mode != "none":
            self._checkpointing = Checkpointing(self.model, self.blocks, mode)
        self._note(checkpointing=mode)

    def set_optimizer(self, settings: Settings) -> None:
        """Update with the optimizer that these settings name, from the state that it had if that is still there.

        Raises:
            WorkloadError: the workload brings none of its own.
        """
        if settings.optimizer == self.settings.optimizer:
            return
        if settings.optimizer == "own" and self.own_optimizer is None:
            raise WorkloadError(brings_none(self._workload.name))
        if self._parked is None and self.optimizer is not self.own_optimizer:
            self._parked = (self.settings.optimizer, KeptState(self.optimizer, release=True))
        if settings.optimizer == "own" and self.own_optimizer:
            self.optimizer = self.own_optimizer
        elif self._parked and self._parked[0] == settings.optimizer:
            with self._device.exempt():
                self._parked[1].restore()
            self.optimizer, self._parked = self._parked[1].optimizer, None
        else:
            self.optimizer = optimizers.build(self.parameters, settings)
        self._note(optimizer=settings.optimizer)

    def set_optimizer_impl(self, name: str) -> None:
        """Let torch compute the optimizer's update in this way.

        Raises:
            WorkloadError: the optimizer has no such implementation.
        """
        optimizers.set_implementation(self.optimizer, name)
        self._note(optimizer_impl=name)

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the optimizer's first group, and scale those of the others by the same factor."""
        if rate != self.optimizer.param_groups[0]["lr"]:
            optimizers.set_learning_rate(self.optimizer, rate)
        self._note(learning_rate=rate)

    def forget_parked_optimizer(self) -> None:
        """A step was done with the optimizer in use: the one before it does not come back."""
        self._parked = None

    def abandon_forward(self) -> None:
        """A forward or backward was left half way."""
        if self._checkpointing:
            self._checkpointing.abandon()

    def replace_scaler(self, state: dict[str, Any]) -> None:
        """Go on with a new loss scaler in this state: one that was left half way believes that it has unscaled."""
        self.scaler = torch.amp.GradScaler(self._device.torch_device.type)
        self.scaler.load_state_dict(state)

    def go_on_with(self, optimizer: Optimizer, settings: Settings) -> None:
        """Weights were put back to an earlier moment: ``optimizer`` is the one of that moment, under ``settings``."""
        self.optimizer, self._parked = optimizer, None
        self._note(**{name: getattr(settings, name) for name in ("optimizer", "optimizer_impl", "learning_rate")})

    def close(self) -> None:
        """Leave the model as it was handed over: no hooks, no gradients."""
        if self._checkpointing:
            self._checkpointing.remove()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Let go of all gradients, also of those that a cell has left."""
        for param in self.parts.parameters():
            param.grad = None

    def _note(self, **applied: Any) -> None:
        self.settings = self.settings.replace(**applied)
