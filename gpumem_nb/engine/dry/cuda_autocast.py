"""Autocast as CUDA has it, for operators on the CPU, whose own lists differ.

The CPU's autocast keeps softmax, layer norm and most losses in 16 bits, where CUDA's computes them in fp32, so it keeps
other tensors for backward. The lists are those of torch/include/ATen/autocast_mode.h (AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE), as far as torch names an operator of them to Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...internals.torch_internals import without_autocast_on_cpu

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


def install() -> Any:
    """Replace the CPU's rules until the process ends or the result is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    rules = ((IN_FP32, _in_fp32), (TO_FP32, _to_fp32), (IN_16_BITS, _in_16_bits))
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


def _with(operator: Any, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        with without_autocast_on_cpu():
            return operator(*_cast(args, change), **{name: _cast(value, change) for name, value in kwargs.items()})

    return cast


def _in_fp32(operator: Any) -> Callable[..., Any]:
    return _with(operator, _widened)


def _in_16_bits(operator: Any) -> Callable[..., Any]:
    return _with(operator, _narrowed)


def _to_fp32(operator: Any) -> Callable[..., Any]:
    def told(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        with without_autocast_on_cpu():
            says = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
            if says or input.dtype not in _SIXTEEN_BIT:
                return operator(input, *args, **kwargs)
            return operator(input, *args, **{**kwargs, "dtype": torch.float32})

    return told
