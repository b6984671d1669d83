"""Undocumented functions of torch that go through many tensors in one call.

- ``torch._foreach_norm`` (the norms of many tensors in few kernels; ``nn.utils.get_total_norm`` came after torch 2.4).
- ``torch._amp_foreach_non_finite_check_and_unscale_`` (the gradient scaler's look at gradients).
- ``torch.utils._foreach_utils._group_tensors_by_device_and_dtype`` (the order in which gradients are clipped).
"""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

CHECKED_WITH = ("2.13.0",)  # of torch


def norms_of(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the 2-norm of each tensor, none of them empty, without waiting for the device."""
    narrow = [tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors]
    if not any(narrow):
        return torch._foreach_norm(tensors) if tensors else ()
    # The norm of finite numbers could be too large for fp16.
    of_narrow = iter(torch._foreach_norm(list(compress(tensors, narrow)), 2, torch.float32))
    others = [tensor for tensor, is_narrow in zip(tensors, narrow, strict=True) if not is_narrow]
    of_others = iter(torch._foreach_norm(others) if others else ())
    return tuple(next(of_narrow if is_narrow else of_others) for is_narrow in narrow)


def type_by_type(tensors: list[Tensor]) -> list[Tensor]:
    """Return these in the order in which ``torch.nn.utils.clip_grad_norm_`` adds up the norms of such gradients."""
    groups = _group_tensors_by_device_and_dtype([list[Tensor | None](tensors)]) if tensors else {}
    return [tensor for (of_group,), _ in groups.values() for tensor in of_group if tensor is not None]


def note_nonfinite(tensors: list[Tensor], found: Tensor, one: Tensor) -> None:
    """Set ``found`` to 1 if any number in these tensors is not finite, without waiting for the device.

    A single call for all of them, which makes no tensor: it multiplies them by ``one`` in place, so they keep their
    bits. Nothing else may write them meanwhile.

    Args:
        tensors: on one device.
        found, one: two numbers in fp32 on it; ``found`` is left as it is where all are finite.

    Raises:
        RuntimeError: it cannot be done for one of these tensors, such as a complex one. All hold what they held.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)
