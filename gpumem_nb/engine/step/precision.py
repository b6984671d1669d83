"""Precision: autocast around the forward pass, loss scaling around fp16's backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(precision: str, device_type: str) -> AbstractContextManager[object]:
    """Return the context of a forward pass under ``fp32``, ``fp16`` or ``bf16``; weights stay fp32 in all of them."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device_type, dtype=DTYPES[precision])
