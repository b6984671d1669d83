"""Building a trainer on all ranks: what fails on one rank alone ends it on all of them, so that no rank waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ..memory.device import Device
from ..shared.errors import WorkloadError
from ..shared.units import DEFAULT_SEED
from ..shared.workload import Workload
from .data.held_out import HeldOut, as_held_out
from .data.iterables import stream_of
from .data.sameness import Look, agree, digest_of, look_at
from .data.stream import Stream
from .link.communicator import here, same_everywhere, together
from .link.signals import interruptible
from .random_state import seeded
from .step.trainer import Trainer


def prepare(make: Callable[[], Workload], seed: int = DEFAULT_SEED) -> tuple[Workload, Stream, HeldOut | None] | None:
    """A workload, its data and its validation data; ``None`` when some other rank could not make it, and says why.

    Args:
        make: gives the workload.
        seed: of all random numbers of this training; the data are made under it alike on all ranks.

    Raises:
        WorkloadError: this rank's data cannot be trained or validated on, or the ranks hold different data. Whatever
            else ``make`` and the data raise comes as it is.
    """

    def work() -> tuple[Workload, Stream, Look, HeldOut | None, int]:
        with interruptible():
            workload = make()
        with seeded(seed), interruptible():
            stream = stream_of(workload.data(), here().rank, here().size, seed)
            held_out = as_held_out(workload.eval_data()) if workload.eval_data else None
            return workload, stream, look_at(stream), held_out, digest_of(held_out)

    prepared = together("data", work)
    if prepared is None:
        return None
    workload, stream, look, held_out, digest = prepared
    agree(stream, look)
    if not same_everywhere(len(held_out or ()), "validation data"):
        raise WorkloadError(
            "The ranks hold validation data of different lengths. Define eval_data in the same way on all ranks."
        )
    comparable = not here().any_rank(digest == 0, "validation samples of some rank")
    if comparable and not same_everywhere(digest, "validation samples"):
        raise WorkloadError(
            "The ranks hold different validation data: samples of one are not those of another. Define eval_data in "
            "the same way on all ranks; what is random in it needs a seed."
        )
    return workload, stream, held_out


def build(
    workload: Workload, stream: Stream, device: Device, started_s: float, held_out: HeldOut | None = None
) -> Trainer | None:
    """Return a trainer that begins with the weights of rank 0; ``None`` when some other rank could not build its model.

    Raises:
        WorkloadError: the model cannot be trained, or the ranks hold different ones. Whatever else building the model
            raises comes as it is.
    """
    with ExitStack() as dropped:

        def work() -> Trainer:
            trainer = Trainer(workload, stream, device, started_s, held_out)
            dropped.callback(trainer.close)  # an attached model lives on
            return trainer

        trainer = together("model", work)
        if trainer is not None:
            trainer.join()
            dropped.pop_all()
        return trainer
