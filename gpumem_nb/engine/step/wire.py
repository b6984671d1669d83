"""Conversion of a gradient for sending: to a type that Horovod can add up, and back into the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

# Both are added up in fp32, for 4 bytes a weight meanwhile: Horovod 0.28 has no all-reduce for bfloat16 (horovod#4047),
# and it adds up before it divides, which passes the largest fp16 number, 65,504, with gradients that do not.
_CARRIED_AS = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_COMPRESSED_AS = {torch.float32: torch.float16, torch.float64: torch.float16}


def carried_dtype(dtype: torch.dtype, compressed: bool) -> torch.dtype:
    """Return the type in which gradients of this type are added up; a complex number is two real ones.

    ``compressed``: in fp16, as ``hvd.Compression.fp16`` has it; what is of 16 bit already goes as it would without.
    """
    if compressed and dtype in _COMPRESSED_AS:
        return _COMPRESSED_AS[dtype]
    return _CARRIED_AS.get(dtype, dtype.to_real() if dtype.is_complex else dtype)


def carried_shapes(param: Tensor, sparse: bool) -> list[tuple[int, ...]]:
    """Return the shapes of what :func:`outgoing` gives for one weight."""
    shape = (*param.shape, 2) if param.is_complex() else tuple(param.shape)
    return [shape, shape[:1]] if sparse else [shape]


def outgoing(param: Tensor, sparse: bool, compressed: bool) -> list[Tensor]:
    """Return what a rank sends for one weight: its gradient, or zeros where it has none.

    A ``sparse`` gradient travels as a whole table, with a column that says which rows it has.
    """
    grad, dtype = param.grad, carried_dtype(param.dtype, compressed)
    if sparse:
        return _table(param, grad, dtype)
    if grad is None:
        grad = torch.zeros_like(param, memory_format=torch.contiguous_format)
    if grad.is_sparse:
        grad = grad.to_dense()
    if grad.is_complex():
        grad = torch.view_as_real(grad.resolve_conj())
    return [grad.to(dtype).contiguous()]


def arrived(param: Tensor, wires: list[Tensor]) -> None:
    """Let what came back be the gradient; in place where there is one, so that little can fail on one rank alone."""
    grad, wire = param.grad, wires[0]
    if len(wires) > 1:
        if grad is None or grad.is_sparse:
            rows = wires[1].nonzero().squeeze(1)
            param.grad = torch.sparse_coo_tensor(
                rows[None], wire[rows].to(param.dtype), param.shape, is_coalesced=True, check_invariants=False
            )
            return
        wire = wire.to(grad.dtype)
    if param.is_complex():
        wire = torch.view_as_complex(wire)
    if grad is None or grad.is_sparse:
        grad = wire.to(param.dtype).view_as(param)
        if grad.stride() != param.stride():  # autograd's own would lie as the weight does, and fused kernels rely on it
            grad = torch.empty_like(param).copy_(grad)
        param.grad = grad
    elif grad.data_ptr() != wire.data_ptr():
        grad.copy_(wire)


def rounding(param: Tensor, wires: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the 2-norms of a gradient and of what it lost on its way out; on the device, without waiting for it."""
    grad, none = param.grad, torch.zeros((), dtype=torch.float32, device=param.device)
    if grad is None:
        return none, none
    if grad.is_sparse:
        grad = grad.to_dense()
    norm = torch.linalg.vector_norm(grad).float()
    if grad.dtype not in _COMPRESSED_AS:
        return norm, none
    return norm, torch.linalg.vector_norm(wires[0].to(grad.dtype).sub_(grad)).float()


def _table(param: Tensor, grad: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    touched = torch.zeros(param.shape[0], dtype=dtype, device=param.device)
    if grad is None:
        return [torch.zeros_like(param, dtype=dtype), touched]
    if not grad.is_sparse:
        return [grad.to(dtype).contiguous(), touched.fill_(1)]
    grad = grad.coalesce()
    touched[grad.indices()[0]] = 1
    return [grad.to_dense().to(dtype).contiguous(), touched]
