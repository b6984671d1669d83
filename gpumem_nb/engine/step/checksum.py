"""A checksum of a tensor's bits, worked out where the tensor is."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_of_words(tensor: Tensor) -> Tensor:
    """The sum of the tensor's bytes as 64-bit words, modulo 2**64, on its device; allocates next to nothing."""
    flat = tensor.detach()
    if flat.is_sparse or not flat.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    words = aligned.view(torch.int64).sum()
    return words + flat[whole:].sum()
