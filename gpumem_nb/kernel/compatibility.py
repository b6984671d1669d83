"""Checks of settings against the workload: refuse those that do not go with it, adapt them when another is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..report.differences import typed
from ..shared.errors import InvalidInput
from ..shared.knobs import KNOBS, additional
from ..shared.settings import Settings
from ..shared.workload import WorkloadInfo


def check(settings: Settings, workload: WorkloadInfo, ranks: int) -> None:
    """Refuse settings under which this workload cannot be trained on that many ranks.

    Raises:
        InvalidInput: saying why, and what is allowed.
    """
    settings.check_together(ranks)
    global_batch = settings.samples_per_rank * ranks
    if workload.dataset_len is not None and global_batch > workload.dataset_len:
        raise InvalidInput(
            f"A global batch of {settings.batch_size} × {settings.accumulation_steps} × {ranks} ranks = "
            f"{global_batch} samples is larger than the dataset ({workload.dataset_len}). "
            f"Allowed here: batch_size × accumulation_steps up to {workload.dataset_len // ranks}."
        )
    for name, knob in KNOBS.items():
        if knob.refuses and (why_not := knob.refuses(getattr(settings, name), workload)):
            raise InvalidInput(why_not)


def usable(settings: Settings, workload: WorkloadInfo | None, ranks: int) -> bool:
    """Return whether that workload can be trained under these settings, as far as that is known."""
    try:
        if workload:
            check(settings, workload, ranks)
    except InvalidInput:
        return False
    return True


def asked(before: Settings, knobs: Mapping[str, Any], ranks: int) -> Settings:
    """Return the settings that setting these knobs would give.

    Raises:
        InvalidInput: an unknown knob, or a value that cannot be used.
    """
    return _settled(before, before.replace(**knobs), knobs.keys(), ranks)


def loaded(before: Settings, workload: WorkloadInfo, ranks: int) -> Settings:
    """Return the settings that another workload is trained under."""
    after = adapted(before, workload)
    return _settled(before, after, after.changed_from(before), ranks)


def _settled(before: Settings, after: Settings, named: Collection[str], ranks: int) -> Settings:
    for knob in KNOBS.values():
        if knob.settles:
            after = after.replace(**knob.settles(before, after, named, ranks))
    return after


def resumed(settings: Settings, saved: Collection[str], workload: WorkloadInfo) -> Settings:
    """Return the settings of a state file; one of an earlier version does not name later knobs.

    It may also name a value that cannot be used on as many ranks as there are now.
    """
    for name, knob in KNOBS.items():
        later = name not in saved and knob not in additional()
        refused = knob.refuses and knob.refuses(getattr(settings, name), workload)
        if knob.adapts and (later or refused):
            settings = settings.replace(**knob.adapts(settings, workload))
    return settings


def check_held_out(workload: WorkloadInfo) -> None:
    """Refuse to evaluate where there is nothing to evaluate on.

    Raises:
        InvalidInput: saying how to name some.
    """
    if workload.eval_len is None:
        raise InvalidInput(
            f"{workload.name} has no validation data. Name some: %hvd_attach model=… data=… eval_data=val_set, or "
            "Workload(..., eval_data=...)."
        )


def adapted(settings: Settings, workload: WorkloadInfo) -> Settings:
    """Return the same without what this workload does not have, and with the values and optimizer that it brings."""
    if workload.adopted:
        settings = settings.replace(**dict(workload.adopted.knobs))
    for knob in KNOBS.values():
        if knob.adapts:
            settings = settings.replace(**knob.adapts(settings, workload))
    return settings


def within_dataset(settings: Settings, workload: WorkloadInfo, ranks: int) -> Settings:
    """Return the same with a global batch no larger than the dataset: with fewer or smaller micro-batches."""
    if workload.dataset_len is None or settings.samples_per_rank * ranks <= workload.dataset_len:
        return settings
    most = workload.dataset_len // ranks
    size = min(settings.batch_size, most)
    return settings.replace(batch_size=size, accumulation_steps=most // size if size else 1)


def kept(settings: Settings, workload: WorkloadInfo, ranks: int) -> str:
    """Return what another load in the place of this one would not have begun with, in words."""
    fresh = within_dataset(adapted(Settings(), workload), workload, ranks)
    now = within_dataset(settings, workload, ranks)
    if now == fresh:
        return ""
    return f"Kept from before: {typed(fresh, now)} (back with: %hvd_set {typed(now, fresh)})."
