"""Horovod's own settings: it reads them when it joins the ranks, so a change lets them join again."""

from __future__ import annotations

import os

import horovod
import horovod.torch as hvd
import torch

from ...install.horovod_source import MARK
from ...memory.device import Device
from ...shared.errors import WorkloadError
from ...shared.knobs.communication import CYCLE_TIME, VARIABLES
from ...shared.settings import Settings
from . import collectives
from .agreement import any_rank

_started_with = {one.name: os.environ.get(one.name, one.default) for one in VARIABLES.values()}
_cycle_was_set = CYCLE_TIME in os.environ
_now = dict(_started_with)


def follow(settings: Settings, device: Device) -> None:
    """Let Horovod work as these settings say. All ranks must come here, and nothing may be under way.

    Raises:
        WorkloadError: this Horovod cannot.
        Separated, HorovodInternalError: the ranks had come apart before.
    """
    wanted = dict(_started_with)
    for knob, variable in VARIABLES.items():
        if (value := getattr(settings, knob)) is not None:
            wanted[variable.name] = variable.written(value)
    changed = dict(wanted.items() - _now.items())
    if not changed:
        return
    if (_cycle_was_set or CYCLE_TIME in changed) and not hasattr(horovod, MARK):
        raise WorkloadError(
            f"this Horovod ends its process when ranks that were given {CYCLE_TIME} are joined again. Build the "
            "toolkit's own (python -m gpumem_nb.install.horovod_build) and %hvd_restart."
        )
    collectives.check()
    any_rank(False, "settings")  # the last one has come: who waits in Horovod's own start cannot be freed
    _now.update(changed)
    os.environ.update(changed)
    device.communicates_on(collectives.join_again())
    _make_fusion_buffer(device)


def why_flat() -> str:
    """Why all-reduces cannot be done in stages, inside of hosts and between them; empty where they can."""
    if not hvd.nccl_built():
        return "only Horovod's build on NCCL has it, and this one reduces over MPI"
    if hvd.size() == hvd.local_size():
        return "it is for ranks on several hosts, and these are on one"
    return ""


def _make_fusion_buffer(device: Device) -> None:
    """Two numbers that travel together: from here on the buffer is there in its new size, and the old one is gone."""
    with device.exempt():
        pair = [torch.zeros(1, device=device.torch_device) for _ in range(2)]
        hvd.grouped_allreduce(pair, op=hvd.Sum, name="gpumem_nb.settings")
