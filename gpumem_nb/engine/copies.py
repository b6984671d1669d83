"""Copies of tensors in host memory that no device counts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in memory of NumPy's, which the virtual GPU rightly does not count: on a GPU it would be the host's."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)  # which NumPy's memory cannot be viewed as
    host = torch.from_numpy(np.empty(tensor.numel() * tensor.element_size(), dtype=np.uint8))
    return host.view(tensor.dtype).reshape(tensor.shape).copy_(tensor.detach())


def overwrite(tensor: Tensor, content: Tensor) -> None:
    """Write ``content`` into a tensor of the same shape, also into an expanded one, whose elements share memory."""
    with torch.no_grad():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.size(dim) > 1:
                tensor, content = tensor.narrow(dim, 0, 1), content.narrow(dim, 0, 1)
        tensor.copy_(content)
