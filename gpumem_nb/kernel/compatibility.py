"""Which settings go with what is loaded: refused when they are asked for, adapted when something else is loaded."""

from __future__ import annotations

from ..shared.errors import InvalidInput
from ..shared.messages import WorkloadInfo
from ..shared.settings import Settings


def check(settings: Settings, workload: WorkloadInfo, ranks: int) -> None:
    """Refuse settings under which this workload cannot be trained on that many ranks."""
    global_batch = settings.samples_per_rank * ranks
    if global_batch > workload.dataset_len:
        raise InvalidInput(
            f"A global batch of {settings.batch_size} × {settings.accumulation_steps} × {ranks} ranks = "
            f"{global_batch} samples is larger than the dataset ({workload.dataset_len}). "
            f"Allowed here: batch_size × accumulation_steps up to {workload.dataset_len // ranks}."
        )
    if settings.optimizer == "own" and not workload.own_optimizer:
        raise InvalidInput(
            f"{workload.name} brings no optimizer of its own. Use optimizer=sgd, momentum, adam or adamw."
        )


def adapted(settings: Settings, workload: WorkloadInfo) -> Settings:
    """The same without what this workload does not have, and with the optimizer that it brings."""
    if not workload.blocks:
        settings = settings.replace(checkpointing="none")
    if workload.own_optimizer:
        own = {"optimizer": "own", "optimizer_impl": "default", "learning_rate": workload.own_learning_rate}
        return settings.replace(**own)
    if settings.optimizer == "own":
        return settings.replace(optimizer=Settings().optimizer, learning_rate=Settings().learning_rate)
    return settings


def within_dataset(settings: Settings, workload: WorkloadInfo, ranks: int) -> Settings:
    """The same with a global batch that is not larger than the dataset."""
    if settings.samples_per_rank * ranks <= workload.dataset_len:
        return settings
    return settings.replace(batch_size=workload.dataset_len // ranks, accumulation_steps=1)
