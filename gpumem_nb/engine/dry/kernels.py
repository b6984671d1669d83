"""Operators and autocast as CUDA has them, for tensors that are on the CPU: what is kept and returned differs there.

Each rule replaces one operator above autograd, so autograd keeps for backward what CUDA's kernel keeps. They hold for
the whole process: this is for a child process only.

The CPU's autocast keeps softmax, layer norm and most losses in 16 bits, where CUDA's computes them in fp32, so it keeps
other tensors for backward. The lists are those of torch/include/ATen/autocast_mode.h (AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE), as far as torch names an operator of them to Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...internals.torch_internals import cast_on_cpu_alone, without_autocast_on_cpu
from ...shared.forecast import Kernels
from . import recurrent

_aten = torch.ops.aten
_LARGEST_FLASH_HEAD = 256
_FLASH_HEAD_MULTIPLE = 8


def install(kernels: Kernels, fake: bool) -> Any:
    """Replace operators until the process ends or the result is destroyed.

    Args:
        kernels: which of several kernels the GPU has.
        fake: for fake tensors; for real ones of the CPU its own fused kernel of attention stands for those of CUDA,
            which keep as much.
    """
    library = torch.library.Library("aten", "IMPL")
    rules: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "linear": _linear,
        "scaled_dot_product_attention": _attention(kernels, fake),
    }
    if fake:
        rules.update(recurrent.rules())
    if fake and hasattr(_aten, "_fused_rms_norm"):  # since torch 2.9
        rules["rms_norm"] = _rms_norm
    for name, rule in rules.items():
        library.impl(name, rule, "AutogradCPU", allow_override=True)
    return library


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Return the fused kernel, which keeps one byte an element: ATen/native/Dropout.cpp, is_fused_kernel_acceptable."""
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


def _attention(kernels: Kernels, fake: bool) -> Callable[..., Tensor]:
    """Attention by the kernel that torch takes: ATen/native/transformers/cuda/sdp_utils.cpp.

    Flash for 16-bit types from compute capability 8.0 on, without a mask; else the memory-efficient one, which takes
    masks and dropout. Both want the numbers of a row side by side, those of a mask too, which a bias that was looked up
    and turned has not (check_last_dim_stride_equals_1_dense). Neither keeps an S × S matrix, nor does cuDNN's, which
    comes first from 9.0 on and keeps what flash keeps. What none of them takes is computed by the plain formula, which
    does. Flash alone takes fewer heads of keys and values than of queries as they are
    (check_batch_size_and_num_heads_dense); the formula repeats them.
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
        grouped = enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]
        head, fitting = query.shape[-1], query.dim() == 4
        one_head = len({part.shape[-1] for part in (query, key, value)}) == 1
        sixteen_bit = query.dtype in (torch.float16, torch.bfloat16)
        in_rows = all(part.stride(-1) == 1 for part in (query, key, value, attn_mask) if part is not None)
        if (
            fitting
            and in_rows
            and kernels.ampere
            and sixteen_bit
            and attn_mask is None
            and one_head
            and head <= _LARGEST_FLASH_HEAD
            and key.shape[-3] == value.shape[-3]
            and fake
        ):
            scale = head**-0.5 if scale is None else scale
            padded = [torch.nn.functional.pad(part, (0, -head % _FLASH_HEAD_MULTIPLE)) for part in (query, key, value)]
            parts = padded if head % _FLASH_HEAD_MULTIPLE else [query, key, value]
            out = _aten._scaled_dot_product_flash_attention(*parts, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :head] if head % _FLASH_HEAD_MULTIPLE else out  # type: ignore[no-any-return]
        learned_mask = attn_mask is not None and attn_mask.requires_grad
        can_be_real = one_head and not learned_mask
        takes = fitting and in_rows and _efficient(query, key, value, kernels.ampere)
        if grouped or not takes or not (fake or can_be_real):
            if grouped:
                key, value = _repeated(key, query), _repeated(value, query)
            bias = None if attn_mask is None else _numbers(attn_mask, query)
            return _aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
                query, key, value, bias, dropout_p, is_causal, scale=scale
            )[0]
        bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
        if not fake:  # by the CPU's kernel, which has no dropout and learns no mask
            result: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
            )[0]
            return result
        keeps = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps, dropout_p, is_causal, scale=head**-0.5 if scale is None else scale
        )[0]
        return out  # type: ignore[no-any-return]

    return attention


def _efficient(query: Tensor, key: Tensor, value: Tensor, ampere: bool) -> bool:
    """Return whether the memory-efficient kernel takes these.

    bf16 from 8.0 on (less_than_sm80_mem_efficient_dtypes), and heads whose rows are whole words for tensor cores
    (check_head_dim_size_mem_efficient, minimum_gemm_alignment), both in sdp_utils.cpp.
    """
    sixteen_bit = query.dtype in (torch.float16, torch.bfloat16)
    if not (query.dtype in (torch.float16, torch.float32) or (query.dtype is torch.bfloat16 and ampere)):
        return False
    multiple = 8 if sixteen_bit else 4 if ampere else 1
    heads = query.shape[-1], value.shape[-1]
    return query.shape[-1] == key.shape[-1] and not any(head % multiple for head in heads)


def _repeated(heads: Tensor, query: Tensor) -> Tensor:
    """As many heads as the query has, as the formula has them (ATen/native/transformers/attention.cpp)."""
    times = query.shape[-3] // heads.shape[-3]
    return heads if times == 1 else heads.repeat_interleave(times, -3)


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask of numbers, expanded without a copy: ATen/native/transformers/attention.cpp, convert_boolean_attn_mask."""
    return _numbers(mask, query).expand(*query.shape[:2], query.shape[2], key.shape[2])


def _numbers(mask: Tensor, query: Tensor) -> Tensor:
    return torch.zeros_like(mask, dtype=query.dtype) if mask.dtype is torch.bool else mask


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """By the fused kernel where ATen/native/layer_norm.cpp, rms_norm_symint, takes it, else by the formula."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    channels_last = last is not None and not input.is_contiguous() and input.is_contiguous(memory_format=last)
    if channels_last or input.is_complex() or (weight is not None and weight.dtype != input.dtype):
        return _aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)  # type: ignore[no-any-return]
    normed: Tensor = _FusedRmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return normed


class _FusedRmsNorm(torch.autograd.Function):
    """The tensors it keeps, without their numbers: the input, the weight, and one number a row (derivatives.yaml)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = (*input.shape[: input.dim() - dims], *[1] * dims)
        of_16_bit = input.dtype in (torch.float16, torch.bfloat16)
        ctx.save_for_backward(input, weight, input.new_empty(rows, dtype=torch.float32 if of_16_bit else input.dtype))
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors
        of_input, of_weight, _ = ctx.needs_input_grad
        return torch.empty_like(input) if of_input else None, torch.empty_like(weight) if of_weight else None, None


IN_FP32 = [
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
]
"""Their tensors are cast to fp32."""

TO_FP32 = ["prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"]
"""Operators that give fp32 unless the call says otherwise."""

IN_16_BITS = ["prelu", "addmv", "addr", "mv", "chain_matmul"]
"""Those that the CPU's lists lack."""

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_IN_FP32_ALONE = ("fft_", "stft", "linalg_")  # which the CPU has in fp32 alone


def install_autocast() -> Any:
    """Replace the CPU's rules until the process ends or the result is destroyed.

    What the CPU's lists name and CUDA's do not runs as it is called: ``cross_entropy`` above all, whose parts decide
    (its ``log_softmax`` asks for the type of the logits, so CUDA computes it in 16 bits and ``nll_loss`` in fp32).
    """
    library = torch.library.Library("aten", "IMPL")
    for name in cast_on_cpu_alone():
        if not name.startswith(_IN_FP32_ALONE):
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
    rules = ((IN_FP32, _cast_by(_widened)), (TO_FP32, _to_fp32), (IN_16_BITS, _cast_by(_narrowed)))
    for names, rule in rules:
        for name in names:
            operator = _operator(name)
            if operator is not None:
                library.impl(name, rule(operator), "AutocastCPU", allow_override=True)
    return library


@contextmanager
def taken_for_the_cpu() -> Iterator[None]:
    """Inside, autocast that the user's own code enters for CUDA is that of the CPU, which has CUDA's rules here."""
    own = torch.autocast.__init__

    def entered(self: torch.autocast, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        own(self, device_type, dtype, *args, **kwargs)

    torch.autocast.__init__ = entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = own  # type: ignore[method-assign]


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None)


def _cast(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_cast(item, change) for item in value) if isinstance(value, list | tuple) else value


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _SIXTEEN_BIT else tensor


def _narrowed(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_autocast_dtype("cpu")) if tensor.dtype is torch.float32 else tensor


def _cast_by(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Callable[..., Any]]:
    def rule(operator: Any) -> Callable[..., Any]:
        def cast(*args: Any, **kwargs: Any) -> Any:
            with without_autocast_on_cpu():
                return operator(*_cast(args, change), **{name: _cast(value, change) for name, value in kwargs.items()})

        return cast

    return rule


def _to_fp32(operator: Any) -> Callable[..., Any]:
    def told(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        with without_autocast_on_cpu():
            says = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
            if says or input.dtype not in _SIXTEEN_BIT:
                return operator(input, *args, **kwargs)
            return operator(input, *args, **{**kwargs, "dtype": torch.float32})

    return told
