"""A rank's description of itself at its start, and whether it may start."""

from __future__ import annotations

import os
import platform
import socket

import torch

from ..memory.device import Device
from ..shared import cluster_records
from ..shared.errors import StartError
from ..shared.messages import RankInfo
from ..shared.version import __version__
from .link import horovod
from .link.communicator import here


def of(device: Device) -> RankInfo:
    """Return this rank's identity: process, host and device."""
    return RankInfo(
        rank=here().rank,
        local_rank=here().local_rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=str(device.torch_device),
        device_name=device.name,
        virtual=device.kind == "virtual",
        memory_limit=device.reading().limit_bytes,
        driver=device.driver,
        threads=torch.get_num_threads(),
        note=device.note,
        allocator=device.allocator,
        machine=cluster_records.machine(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        versions=(
            f"Python {platform.python_version()}",
            f"torch {torch.__version__}",
            f"Horovod {horovod.VERSION}",
            f"gpumem_nb {__version__}",
        ),
    )


def check_sharing(ranks: int, gpus: int, nccl: bool) -> None:
    """Refuse more ranks than GPUs on a host where Horovod was built on NCCL, which allows one rank a GPU.

    Raises:
        StartError: there are more ranks than GPUs.
    """
    if nccl and ranks > gpus:
        raise StartError(
            f"{ranks} ranks cannot share {gpus} GPU{'s' * (gpus != 1)} with this Horovod, because NCCL allows one rank "
            f"on each. Start {max(1, gpus)}, or build Horovod so that ranks can share a GPU: "
            "python -m gpumem_nb.install.horovod_build --gpu staged"
        )
