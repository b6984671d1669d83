"""Some of the ranks joined to each other alone, while the others wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import horovod.torch as hvd
from mpi4py import MPI

from ...memory.device import Device
from . import collectives
from .horovod_settings import make_fusion_buffer

T = TypeVar("T")
_TAG = 20_011  # of messages between ranks that Horovod does not join
_PAUSE_S = 0.005


def among(count: int, device: Device, work: Callable[[], T]) -> T | None:
    """Do work on the first so many ranks, joined to each other alone; ``None`` on the others, which wait.

    All ranks must come here, with nothing under way. They are joined again afterwards, whatever happened.

    Raises:
        WorkloadError: some rank's Horovod cannot be joined again.
        Separated: Horovod could not be shut down.
    """
    if count == hvd.size():
        return work()
    collectives.check_again()
    rank = hvd.rank()
    try:
        if rank < count:
            device.communicates_on(collectives.join_again(count))
            return work()
        hvd.shutdown()
        _wait()
        return None
    finally:
        if rank < count:
            hvd.shutdown()  # also ends what others of the group may wait for
        if rank == 0:
            _let_go_on(count)
        device.communicates_on(collectives.join_again())
        make_fusion_buffer(device)


def _let_go_on(count: int) -> None:
    """Tell those who wait: one that waited in a collective for so long would take a core from those who work."""
    world = MPI.COMM_WORLD
    for rank in range(count, world.Get_size()):
        world.send(None, rank, _TAG)


def _wait() -> None:
    while not MPI.COMM_WORLD.iprobe(0, _TAG):
        time.sleep(_PAUSE_S)
    MPI.COMM_WORLD.recv(source=0, tag=_TAG)
