"""All-reduces of messages of several sizes, timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from ...memory.device import Device
from ...shared.questions import Sweep
from .communicator import here

_LEAST, _MOST = 5, 30  # times that each size is sent
_MOST_BYTES = 64 * 2**20  # of one size altogether, unless that were fewer than the least


def sweep(sizes: Sequence[int], device: Device) -> Sweep:
    """Sum tensors of these sizes in bytes over the ranks, each several times. All ranks of the group must come here."""
    seconds = {}
    with device.exempt():
        for size in sizes:
            tensor = torch.zeros(size // 4, dtype=torch.float32, device=device.torch_device)
            times = [_once(tensor, f"gpumem_nb.sweep.{size}") for _ in range(1 + _times(size))]
            seconds[size] = statistics.median(times[1:])  # with the first one the ranks agree on its name
    return Sweep(seconds)


def _times(size: int) -> int:
    return min(_MOST, max(_LEAST, _MOST_BYTES // size))


def _once(tensor: torch.Tensor, name: str) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    here().all_reduce([tensor], name)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began_s
