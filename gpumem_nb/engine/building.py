"""Building a trainer on all ranks: what fails on one rank alone ends it on all of them, so that nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import horovod.torch as hvd

from ..memory.device import Device
from ..shared.errors import WorkloadError
from ..shared.workload import Workload
from .data.held_out import HeldOut, as_held_out
from .step.data import ShardedStream, as_dataset
from .step.trainer import Trainer
from .together.agreement import any_rank, same_everywhere
from .together.interrupts import interruptible

Result = TypeVar("Result")


def prepare(make: Callable[[], Workload]) -> tuple[Workload, ShardedStream, HeldOut | None] | None:
    """A workload, its data and its validation data; ``None`` when some other rank could not make it, and says why.

    Raises:
        WorkloadError: this rank's data cannot be trained or validated on, or the ranks hold different validation data.
            Whatever else ``make`` and the data raise comes as it is.
    """

    def work() -> tuple[Workload, ShardedStream, HeldOut | None]:
        workload = make()
        with interruptible():
            data = as_dataset(workload.data())
            held_out = as_held_out(workload.eval_data()) if workload.eval_data else None
        stream = ShardedStream(*data, rank=hvd.rank(), size=hvd.size())
        if stream.length < stream.size:
            raise WorkloadError(f"The dataset has {stream.length} samples, fewer than the {stream.size} ranks.")
        return workload, stream, held_out

    prepared = _together("data", work)
    if prepared and not same_everywhere(len(prepared[2] or ()), "validation data"):
        raise WorkloadError(
            "The ranks hold validation data of different lengths. Define eval_data in the same way on all ranks."
        )
    return prepared


def build(
    workload: Workload, stream: ShardedStream, device: Device, started_s: float, held_out: HeldOut | None = None
) -> Trainer | None:
    """A trainer that begins with the weights of rank 0; ``None`` when some other rank could not build its model.

    Raises:
        WorkloadError: the model cannot be trained, or the ranks hold different ones. Whatever else building the model
            raises comes as it is.
    """
    with ExitStack() as dropped:

        def work() -> Trainer:
            trainer = Trainer(workload, stream, device, started_s, held_out)
            dropped.callback(trainer.close)  # an attached model lives on
            return trainer

        trainer = _together("model", work)
        if trainer is not None:
            trainer.join()
            dropped.pop_all()
        return trainer


def _together(what: str, work: Callable[[], Result]) -> Result | None:
    """Do what may fail on one rank alone; ``None`` when it did on another one."""
    failure: BaseException | None = None
    result = None
    try:
        result = work()
    except BaseException as error:
        failure = error
    if any_rank(failure is not None, what):
        if failure:
            raise failure
        return None
    return result
