"""Some of the ranks joined to each other alone, while the others wait; all-reduces timed among them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import horovod.torch as hvd
import torch
from mpi4py import MPI

from ...memory.device import Device
from ...shared.errors import WorkloadError
from ...shared.questions import Sweep
from . import collectives
from .communicator import Separated, here

T = TypeVar("T")
_TAG = 20_011  # of messages between ranks that Horovod does not join
_PAUSE_S = 0.005


def among(count: int, device: Device, work: Callable[[], T]) -> T | None:
    """Do work on the first so many ranks, joined to each other alone; ``None`` on the others, which wait.

    All ranks must come here, with nothing under way. Afterwards they are joined again; or none is, where the work
    raised on one of them.

    Raises:
        WorkloadError: ranks run on several hosts, or some rank's Horovod cannot be joined again.
        Separated: the ranks had come apart before, or the work raised elsewhere; they are apart now.
    """
    link = here()
    link.check()
    if count == link.size:
        return work()
    if link.any_rank(link.size != link.local_size, "one host"):
        raise WorkloadError(
            "Some ranks alone can be measured where all run on one host: on several it was never tried."
        )
    collectives.check_again()
    rank, found, done = link.rank, None, False
    try:
        if rank < count:
            device.communicates_on(link.rejoin(count))
            found, done = work(), True
    finally:
        hvd.shutdown()  # what raised here ends the waiting of others in the group
        if rank == 0:
            _tell_others(count, done)
    if rank >= count and not _others_are_done():
        raise Separated("The ranks that this one waited for came apart.")
    device.communicates_on(link.rejoin())
    collectives.greet(device)
    return found


def _tell_others(count: int, done: bool) -> None:
    """Tell those who wait: one that waited in a collective for so long would take a core from those who work."""
    world = MPI.COMM_WORLD
    for rank in range(count, world.Get_size()):
        world.send(done, rank, _TAG)


def _others_are_done() -> bool:
    while not MPI.COMM_WORLD.iprobe(0, _TAG):
        time.sleep(_PAUSE_S)
    done: bool = MPI.COMM_WORLD.recv(source=0, tag=_TAG)
    return done


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
