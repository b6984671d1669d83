"""Undocumented parts of torch's ``GradScaler``: ``_per_optimizer_states``, and the stage of a step in it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

CHECKED_WITH = ("2.13.0",)  # of torch


def found_by_others(scaler: torch.amp.GradScaler, optimizer: Optimizer, found: Tensor) -> None:
    """Let a gradient scaler, which has unscaled these gradients, know that others of the step are not finite."""
    of_devices = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    if not of_devices:
        of_devices[found.device] = torch.zeros((), dtype=torch.float32, device=found.device)
    for number in of_devices.values():
        number.copy_(torch.maximum(number, found.to(number.device, torch.float32)))


def may_step_again(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Let a gradient scaler, which has unscaled these gradients, take another step of the optimizer."""
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
