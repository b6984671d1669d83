"""Making the ranks the same again: what rank 0 holds, for all."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
from torch.optim import Optimizer

from ...memory.device import Device
from ..step import optimizers
from ..step.parts import in_groups
from ..step.trainer import Trainer
from .restore import placed
from .storable import plain


def sync(trainer: Trainer, device: Device) -> None:
    """Give all ranks the weights, buffers, optimizer states and loss scale of rank 0; all of them call it together.

    Raises:
        WorkloadError: the ranks hold different models, so that there is nothing to give.
        StateFileError: an optimizer on rank 0 keeps something in its state that cannot be sent; raised on all ranks.
    """
    live = trainer.live
    with device.exempt():
        trainer.join()
        for optimizer in {id(one): one for one in (live.optimizer, live.own_optimizer) if one}.values():
            _sync_optimizer(optimizer)
        live.replace_scaler(hvd.broadcast_object(live.scaler.state_dict(), root_rank=0, name="gpumem_nb.scaler"))
    trainer.watch.ask()


def _sync_optimizer(optimizer: Optimizer) -> None:
    sent: Any = None
    if hvd.rank() == 0:
        try:
            sent = _packed(optimizer)
        except Exception as error:  # the other ranks wait for an answer
            sent = error
    sent = hvd.broadcast_object(sent, root_rank=0, name="gpumem_nb.optimizer")
    if isinstance(sent, Exception):
        raise sent
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
