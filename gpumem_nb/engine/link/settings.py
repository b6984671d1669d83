"""Horovod's own settings: it reads them when it joins the ranks, so a change lets them join again."""

from __future__ import annotations

import os

import horovod.torch as hvd

from ...memory.device import Device
from ...shared.knobs.communication import VARIABLES
from ...shared.settings import Settings
from . import collectives
from .communicator import here

_started_with = {one.name: os.environ.get(one.name, one.default) for one in VARIABLES.values()}
_now = dict(_started_with)


def started_with() -> dict[str, str]:
    """Return Horovod's variables that this rank was started with, where they are not Horovod's own defaults."""
    defaults = {one.name: one.default for one in VARIABLES.values()}
    return {name: value for name, value in _started_with.items() if value != defaults[name]}


def follow(settings: Settings, device: Device) -> None:
    """Let Horovod work as these settings say. All ranks must come here, and nothing may be under way.

    Raises:
        WorkloadError: some rank's Horovod cannot.
        Separated: the ranks had come apart before.
    """
    wanted = dict(_started_with)
    for knob, variable in VARIABLES.items():
        if (value := getattr(settings, knob)) is not None:
            wanted[variable.name] = variable.written(value)
    changed = dict(wanted.items() - _now.items())
    if not changed:
        return
    here().check()
    collectives.check_again(changed)  # the last one has come: who waits in Horovod's own start cannot be freed
    _now.update(changed)
    os.environ.update(changed)
    device.communicates_on(here().rejoin())
    collectives.greet(device)


def why_flat() -> str:
    """Return why all-reduces cannot be done in stages, inside of hosts and between them; empty where they can."""
    if not hvd.nccl_built():
        return "only Horovod's build on NCCL has it, and this one reduces over MPI"
    if hvd.size() == hvd.local_size():
        return "it is for ranks on several hosts, and these are on one"
    return ""
