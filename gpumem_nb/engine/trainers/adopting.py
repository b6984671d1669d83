"""Trainers that people made: taken apart into a model, its loss, data and update, and first values of knobs.

Everything else in the engine trains these parts as any other workload, and knows of no trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...shared.errors import WorkloadError
from ...shared.workload import Adopted
from .lightning_module import is_data_module, is_lightnings_trainer, is_module, of_module
from .prepared import of_accelerator, of_prepared
from .taking import Taking
from .transformers_trainer import is_trainer, of_trainer

_KINDS = (
    "a Trainer of transformers, an SFTTrainer of TRL, accelerate's Accelerator or what its prepare returned, a "
    "Lightning module, or a Lightning Trainer with model="
)
_WHOLE = ("model", "optimizer", "scheduler")


def adopt(found: Mapping[str, Any], ranks: int, device: torch.device) -> tuple[dict[str, Any], Adopted]:
    """Return the parts of a trainer by the roles of ``attach``, and what is told of it.

    Args:
        found: the ``trainer``, and what was named beside it, by their roles.
        ranks: as many will train it.
        device: of this rank.

    Raises:
        WorkloadError: it is no trainer, or one that cannot be kept.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # transformers' arguments have made the first GPU the current one
    trainer, beside = found["trainer"], {role: value for role, value in found.items() if role != "trainer"}
    taking = _taken(trainer, beside, ranks, device)
    for role in _WHOLE:
        if role in beside and role in taking.parts and beside[role] is not taking.parts[role]:
            raise WorkloadError(
                f"trainer= brings a {role} of its own. Leave {role}= out, or attach the parts without trainer=."
            )
    if is_data_module(beside.get("data")):  # its loaders were taken
        del beside["data"]
    for role in sorted(beside.keys() - set(_WHOLE)):
        taking.replaced(role, type(beside[role]).__name__, f"{role}=, named beside trainer=")
    parts = taking.parts | beside
    if "data" not in parts:
        raise WorkloadError("trainer= brings no training data. Name some beside it: data=loader.")
    return parts, taking.adopted()


def _taken(trainer: Any, beside: Mapping[str, Any], ranks: int, device: torch.device) -> Taking:
    if is_trainer(trainer):
        return of_trainer(trainer, ranks, device)
    if is_module(trainer):
        return of_module(trainer, None, beside, ranks)
    if is_lightnings_trainer(trainer):
        if not is_module(beside.get("model")):
            raise WorkloadError("A Lightning Trainer knows no module yet. Name it, too: model=module.")
        return of_module(beside["model"], trainer, beside, ranks)
    if type(trainer).__name__ == "Accelerator" and type(trainer).__module__.startswith("accelerate."):
        return of_accelerator(trainer, ranks)
    if isinstance(trainer, list | tuple) and any(isinstance(thing, nn.Module) for thing in trainer):
        return of_prepared(trainer, ranks)
    hint = " Name it as model= and its data as data=." if isinstance(trainer, nn.Module) else ""
    raise WorkloadError(f"trainer= is of type {type(trainer).__name__}. Allowed: {_KINDS}.{hint}")
