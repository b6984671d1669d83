"""Some of the ranks joined to each other alone, while the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import horovod.torch as hvd
from mpi4py import MPI

from ...memory.device import Device
from ...shared.errors import WorkloadError
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
