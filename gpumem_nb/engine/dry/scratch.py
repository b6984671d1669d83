"""Memory that CUDA's kernels take and give back before they return: one rule per kind of operator, with its source.

Bytes come from the shapes alone, a number for each piece, because the allocator finds a place for each by itself.
Kernels of which no rule is known here are taken to need nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_INT64 = 8
_FP32 = 4
_WARP = 32
_ROWS_A_THREAD = 10  # NROWS_PER_THREAD
_UNSORTED_INDICES = 3072
_TURNED = 1.5
_INDEX_TENSORS = 7  # sorted and original indices, segments, partial segments and their offsets, and those of the sort


def _embedding_backward(args: Any, result: Tensor) -> list[int]:
    """Partial sums of rows, in fp32, and sorted indices: ATen/native/cuda/EmbeddingBackwardKernel.cu.

    As many partial sums as there can be, because the kernel does not wait to be told how many different indices there
    are. A few indices are not sorted: ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda.
    """
    grad, indices, rows, padding = args[:4]
    count = indices.numel()
    if count <= _UNSORTED_INDICES and padding < 0:
        return []
    width = -(-grad.shape[-1] // _WARP) * _WARP
    partial = count // _ROWS_A_THREAD + min(count, rows)
    return [*[count * _INT64] * _INDEX_TENSORS, partial * width * _FP32]


def _attention_backward(args: Any, result: Any) -> list[int]:
    """Row sums of gradient times output, ``delta``; in fp32 that product is a tensor for a moment.

    ATen/native/transformers/cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h,
    ``kKernelComputesDelta``, which holds for 16-bit types alone.
    """
    query, value = args[1], args[3]
    sums = query.shape[0] * query.shape[1] * query.shape[2] * _FP32
    return [sums * value.shape[3], sums] if query.dtype is torch.float32 else [sums]


def _flash_backward(args: Any, result: Any) -> list[int]:
    """Row sums, and the gradient of the query in fp32: ATen/native/transformers/cuda/flash_attn/flash_api.cpp.

    Where several heads of the query share keys and values, their gradients for each of the query's heads besides
    (``dk_expanded``, ``dv_expanded``).
    """
    query, key = args[1:3]
    apart = query.shape[1] * math.prod(key.shape) // key.shape[1] * key.element_size()
    length = -(-query.shape[2] // 128) * 128
    head = -(-query.shape[3] // 32) * 32
    sums = query.shape[0] * query.shape[1] * length * _FP32
    return [sums, sums * head, *[apart] * 2 * (query.shape[1] != key.shape[1])]


def _convolution_backward(args: Any, result: Any) -> list[int]:
    """Return the workspace of cuDNN, by a rule of thumb: what is read and written, and half as much again.

    Tensor cores take channels last, so cuDNN turns what lies otherwise into its workspace, images, weights and gradient
    alike; plans that it tries and drops leave theirs in the cache. Which plan it takes is not documented. Of simple
    rules this one came nearest to published peaks (docs/prediction-cold.md), with none for forward.
    """
    grad, images, weight = args[:3]
    return [int(_TURNED * (grad.nbytes + images.nbytes + weight.nbytes))]


_RULES: dict[Any, Callable[[Any, Any], list[int]]] = {
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _attention_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten.convolution_backward.default: _convolution_backward,
}


def inside(operator: Any, args: Any, result: Any) -> list[int]:
    """Bytes of each piece that a call of this operator takes inside."""
    rule = _RULES.get(operator)
    return rule(args, result) if rule else []
