"""Undocumented parts of accelerate, looked up on an object that people made: nothing is imported here."""

from __future__ import annotations

from typing import Any

CHECKED_WITH = ("1.15.0",)


def prepared_by(accelerator: Any) -> list[Any]:
    """Return everything that an ``Accelerator`` has prepared: models, optimizers, schedulers and loaders."""
    kinds = ("_models", "_optimizers", "_schedulers", "_dataloaders")
    return [thing for kind in kinds for thing in getattr(accelerator, kind)]
