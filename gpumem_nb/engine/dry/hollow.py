"""What is trained on a rank, as a dry run takes it: its objects without their tensors' values, and three micro-batches.

The dry run makes these objects anew for each step that it takes, in its own mode, so that tensors have no memory there.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...memory.device import Device
from ...shared.errors import WorkloadError, text_of
from ...shared.workload import Workload
from ..packing import emptied, packed
from ..random_state import set_aside
from ..step.narrowed import widen_weight
from ..step.optimizer_state import state_of
from ..step.partition import Partition
from ..step.parts import Parts, in_groups
from .batches import Batches

if TYPE_CHECKING:
    from ..step.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Hollow:
    """Everything that is trained, without the values of its tensors.

    Attributes:
        name: of the workload.
        packed: model, loss, own optimizer, blocks and head in one pickle, because they share weights.
        batches: its data.
        partition: how ranks share the own optimizer's state, if they do.
        narrow: places among the weights of those that lie in bf16 for now.
    """

    name: str
    packed: bytes
    batches: Batches
    partition: Partition | None = None
    narrow: tuple[int, ...] = ()

    def workload(self) -> Workload:
        """Return a workload of new objects, whose tensors are of the mode that this is called in."""
        model, loss, optimizer, blocks, head = pickle.loads(self.packed)
        weights = list(Parts(model, loss).parameters())
        for place in self.narrow:
            widen_weight(weights[place])
        if self.partition:
            self.partition.widen(optimizer, (param for param in in_groups(optimizer) if param.requires_grad))
        return Workload(
            self.name,
            lambda: model,
            lambda: self.batches,
            loss,
            optimizer=(lambda params: optimizer) if optimizer is not None else None,
            blocks=blocks,
            head=head,
        )


Given = Workload | Hollow
"""What a dry run is given."""


def made(given: Given) -> Workload:
    """Return the workload whose factories are to be called next."""
    return given.workload() if isinstance(given, Hollow) else given


def of_trainer(trainer: Trainer, device: Device) -> bytes:
    """Return what a trainer trains, pickled; what is done for it leaves no memory on the device and moves no numbers.

    Raises:
        WorkloadError: something in it cannot be pickled, or no micro-batch be made.
    """
    workload, live = trainer.workload, trainer.live
    with device.exempt(), set_aside():
        batches = Batches(trainer.stream.handed())
        try:
            objects = emptied((live.model, workload.loss, live.own_optimizer, workload.blocks, workload.head))
            partition = state_of(live.own_optimizer).partition if live.own_optimizer else None
            narrow = live.narrowed.places(Parts(live.model, workload.loss).parameters())
            return packed(Hollow(workload.name, objects, batches, partition, narrow))
        except Exception as error:
            raise WorkloadError(
                f"{workload.name} cannot be sent to another process ({type(error).__name__}: {text_of(error)}), which "
                "takes steps for GPUs that are not here. Let model, loss and optimizer hold nothing that cannot be "
                "pickled, or write a Workload of functions that make them and ask gm.predict(workload, gpu=...)."
            ) from None
