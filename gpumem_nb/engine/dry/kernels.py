"""Operators as CUDA computes them, for tensors that are on the CPU: what they keep and return differs there.

Each rule replaces one operator above autograd, so autograd keeps for backward what CUDA's kernel keeps. They hold for
the whole process: this is for a child process only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...shared.dry_run import Kernels

_aten = torch.ops.aten
_LARGEST_FLASH_HEAD = 256
_FLASH_HEAD_MULTIPLE = 8


def install(kernels: Kernels, attention: bool) -> Any:
    """Replace operators until the process ends or the result is destroyed.

    Args:
        kernels: which of several kernels the GPU has.
        attention: replace that too; on real tensors of the CPU CUDA's kernels cannot be computed.
    """
    library = torch.library.Library("aten", "IMPL")
    rules: dict[str, Callable[..., Any]] = {"dropout": _dropout, "linear": _linear}
    if attention:
        rules["scaled_dot_product_attention"] = _attention(kernels)
    for name, rule in rules.items():
        library.impl(name, rule, "AutogradCPU", allow_override=True)
    return library


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """The fused kernel, which keeps one byte an element: ATen/native/Dropout.cpp, is_fused_kernel_acceptable."""
    if not train or p == 0:
        return input
    if 0 < p < 1 and input.numel():
        dropped: Tensor = _aten.native_dropout(input, p, True)[0]
        return dropped
    return input * torch.zeros((), dtype=input.dtype)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ATen/native/Linear.cpp: the bias is added in place, which that leaves to others under a dispatch mode."""
    if bias is None:
        return _aten.matmul(input, weight.t())  # type: ignore[no-any-return]
    if input.dim() == 2:
        return _aten.addmm(bias, input, weight.t())  # type: ignore[no-any-return]
    if input.dim() == 3 and input.is_contiguous():
        rows = input.reshape(-1, input.shape[-1])
        return _aten.addmm(bias, rows, weight.t()).view(*input.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]
    return _aten.matmul(input, weight.t()).add_(bias)  # type: ignore[no-any-return]


def _attention(kernels: Kernels) -> Callable[..., Tensor]:
    """Attention by the flash kernel or the memory-efficient one, neither of which keeps an S × S matrix.

    torch chooses so in ATen/native/transformers/cuda/sdp_utils.cpp: flash for 16-bit types from compute capability 8.0
    on, without a mask; else the memory-efficient one, which takes masks, dropout and any type.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        if query.dim() != 4:
            return _by_hand(query, key, value, attn_mask, dropout_p, scale)
        head = query.shape[-1]
        scale = head**-0.5 if scale is None else scale
        sixteen_bit = query.dtype in (torch.float16, torch.bfloat16)
        if kernels.flash and sixteen_bit and attn_mask is None and head <= _LARGEST_FLASH_HEAD:
            padded = [torch.nn.functional.pad(part, (0, -head % _FLASH_HEAD_MULTIPLE)) for part in (query, key, value)]
            parts = padded if head % _FLASH_HEAD_MULTIPLE else [query, key, value]
            out = _aten._scaled_dot_product_flash_attention(*parts, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :head] if head % _FLASH_HEAD_MULTIPLE else out  # type: ignore[no-any-return]
        bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
        keeps = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, scale=scale
        )[0]
        return out  # type: ignore[no-any-return]

    return attention


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask of numbers, expanded without a copy: ATen/native/transformers/attention.cpp, convert_boolean_attn_mask."""
    bias = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype is torch.bool else mask
    return bias.expand(*query.shape[:2], query.shape[2], key.shape[2])


def _by_hand(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float | None
) -> Tensor:
    """The plain formula, which CUDA uses too for what is not (batch, heads, sequence, head)."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return _dropout(scores.softmax(-1), dropout_p, True) @ value
