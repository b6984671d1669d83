"""Making the ranks the same again: what rank 0 holds, for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...memory.device import Device
from ..step import optimizers
from ..step.joining import check_alike, take_from_first
from ..step.parts import in_groups
from ..step.trainer import Trainer
from .restore import placed, taken_back
from .storable import plain


def sync(trainer: Trainer, device: Device) -> None:
    """Give all ranks what rank 0 has: weights, buffers, states of optimizers and scheduler, rates, loss scale.

    All of them call it together.

    Raises:
        WorkloadError: the ranks hold different models, so that there is nothing to give.
        StateFileError: something on rank 0 keeps what cannot be sent in its state; raised on all ranks.
    """
    live = trainer.live
    with device.exempt():
        live.resume_modes()  # a cell may have called eval() on one rank alone
        check_alike(live, options=False)
        take_from_first(live)
        for optimizer in {id(one): one for one in (live.optimizer, live.own_optimizer) if one}.values():
            _sync_optimizer(optimizer)
        live.replace_scaler(hvd.broadcast_object(live.scaler.state_dict(), root_rank=0, name="gpumem_nb.scaler"))
        if live.scheduler:
            _sync_scheduler(live.scheduler)
    trainer.watch.begin_anew()


def _from_first(get: Callable[[], Any], name: str) -> Any:
    sent: Any = None
    if hvd.rank() == 0:
        try:
            sent = get()
        except Exception as error:  # the other ranks wait for an answer
            sent = error
    sent = hvd.broadcast_object(sent, root_rank=0, name=name)
    if isinstance(sent, Exception):
        raise sent
    return sent


def _sync_optimizer(optimizer: Optimizer) -> None:
    sent = _from_first(lambda: _packed(optimizer), "gpumem_nb.optimizer")
    params = list(in_groups(optimizer))
    state = {params[place]: placed(values, params[place]) for place, values in sent["state"].items()}
    optimizers.put_state(optimizer, state, sent["groups"])


def _packed(optimizer: Optimizer) -> dict[str, Any]:
    """State by the places of the weights, so that it is the same whatever a rank did to its own."""
    what = f"The optimizer {type(optimizer).__name__}"
    states = ((place, optimizer.state.get(param)) for place, param in enumerate(in_groups(optimizer)))
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {
        "state": {place: plain(values, what) for place, values in states if values},
        "groups": plain(groups, what),
    }


def _sync_scheduler(scheduler: LRScheduler) -> None:
    what = f"The scheduler {type(scheduler).__name__}"
    state = _from_first(lambda: plain(scheduler.state_dict(), what), "gpumem_nb.scheduler")
    scheduler.load_state_dict(taken_back(scheduler, state))
