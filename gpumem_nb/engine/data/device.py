"""Bringing a batch to the device."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device, copy: bool = False) -> Any:
    """The batch with every tensor in it on the device.

    With ``copy`` a tensor is copied even if it lies there already: a virtual GPU counts no memory that another process
    has shared, and a real one would hold a copy too.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True, copy=copy)
    if isinstance(batch, dict):
        return {key: to_device(value, device, copy) for key, value in batch.items()}
    if copy and isinstance(batch, MutableMapping):  # such as transformers' BatchEncoding, whose ``to`` copies nothing
        batch.update({key: to_device(value, device, copy) for key, value in batch.items()})
        return batch
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, copy) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, copy) for value in batch)
    return batch
