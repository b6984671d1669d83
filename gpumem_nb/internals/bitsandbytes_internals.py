"""The state of bitsandbytes' 8-bit AdamW, made of torch's and turned back into it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

CHECKED_WITH = ("0.50.2",)
_BLOCK = 256  # numbers that share a scale
_MOMENTS = (("exp_avg", "state1", "absmax1", "qmap1"), ("exp_avg_sq", "state2", "absmax2", "qmap2"))


def adamw8bit(params: Iterable[Tensor], lr: float) -> Optimizer:
    """Return a new one, with the same other options as torch's AdamW.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    logger = logging.getLogger("bitsandbytes")
    before = logger.level
    logger.setLevel(logging.ERROR)  # it warns of kernels for weights of 4 bits that are not there
    try:
        optim: Any = import_module("bitsandbytes.optim")
        optimizer: Optimizer = optim.AdamW8bit(list(params), lr=lr)
    finally:
        logger.setLevel(before)
    return optimizer


def is_adamw8bit(optimizer: Optimizer) -> bool:
    """Return whether it is one."""
    return f"{type(optimizer).__module__}.{type(optimizer).__name__}" == "bitsandbytes.optim.adamw.AdamW8bit"


def in_8_bits(optimizer: Any, state: dict[Tensor, dict[str, Any]]) -> None:
    """Give an 8-bit AdamW without state what torch's has for its weights; small ones stay in 32 bits."""
    functional: Any = import_module("bitsandbytes.functional")
    for place, group in enumerate(optimizer.param_groups):
        for number, param in enumerate(group["params"]):
            kept = state.get(param)
            if not kept:
                continue
            optimizer.init_state(group, param, place, number)
            mine = optimizer.state[param]
            mine["step"] = int(kept["step"])
            for name, moment, scales, code in _MOMENTS:
                value = kept[name].to(torch.float32).contiguous()
                if mine[moment].dtype is torch.uint8:
                    functional.quantize_blockwise(value, mine[code], mine[scales], mine[moment], blocksize=_BLOCK)
                else:
                    mine[moment].copy_(value)


def in_32_bits(optimizer: Optimizer, state: dict[Tensor, dict[str, Any]], wide: Collection[int] = ()) -> None:
    """Give torch's AdamW without state what an 8-bit one has for its weights.

    The numbers are of each weight's type, and in fp32 for those whose ids are in ``wide``.
    """
    functional: Any = import_module("bitsandbytes.functional")
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        kept = state.get(param)
        if not kept:
            continue
        mine: dict[str, Any] = {"step": torch.tensor(float(kept["step"]), dtype=torch.float32, device="cpu")}
        for name, moment, scales, code in _MOMENTS:
            mine[name] = torch.empty_like(param, dtype=torch.float32 if id(param) in wide else param.dtype)
            if kept[moment].dtype is torch.uint8:
                whole = functional.dequantize_blockwise(
                    kept[moment].contiguous(), absmax=kept[scales], code=kept[code], blocksize=_BLOCK
                )
                mine[name].copy_(whole)
            else:
                mine[name].copy_(kept[moment])
        optimizer.state[param] = mine
