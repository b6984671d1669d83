"""Differences between two settings, in words. Empty where they are the same."""

from __future__ import annotations

from ..shared.knobs import CHANGES, KEEPS, KEEPS_TO_ROUNDING, KNOBS
from ..shared.settings import Settings
from ..shared.values import Kind
from ..shared.workload import Splits

NOT_KNOWN = Splits()
DOES = {
    KEEPS: "keeps the mathematics",
    KEEPS_TO_ROUNDING: "keeps the mathematics to rounding",
    CHANGES: "changes the mathematics",
}


def typed(before: Settings, after: Settings) -> str:
    """Return what to type after ``%hvd_set`` to get from one to the other: ``batch_size=16 accumulation_steps=2``."""
    changed = after.changed_from(before)
    return " ".join(f"{name}={KNOBS[name].text(value)}" for name, value in changed.items())


def arrows(before: Kind, after: Kind) -> str:
    """Both values of what was changed, of settings or of a policy: ``precision fp32 → bf16, batch_size 32 → 64``."""
    changed = [(after.table[name], value) for name, value in after.changed_from(before).items()]
    return ", ".join(f"{one.name} {one.text(getattr(before, one.name))} → {one.text(v)}" for one, v in changed)


def splits(before: Settings, after: Settings) -> bool:
    """Say whether the change trains the same samples in other micro-batches."""
    return after.batch_size != before.batch_size and after.samples_per_rank == before.samples_per_rank


def changes(before: Settings, after: Settings, splits: Splits) -> str:
    """Say what the change does to the mathematics: ``KEEPS``, ``KEEPS_TO_ROUNDING`` or ``CHANGES``."""
    return CHANGES if splits.mean is False and after.batch_size != before.batch_size else after.mathematics(before)


def mathematics(before: Settings, after: Settings, splits: Splits = NOT_KNOWN) -> str:
    """Say in words what the change does to the mathematics: ``changes the mathematics (precision, batch_size)``."""
    what, size, was = changes(before, after, splits), after.batch_size, before.batch_size
    names = [name for name in after.changed_from(before) if KNOBS[name].mathematics_of(before, after) == CHANGES]
    if what == CHANGES and not names:
        return f"{DOES[what]} (batch_size: the gradient of a micro-batch is not the mean of its parts' gradients)"
    does = DOES[what] + (f" ({', '.join(names)})" if names else "")
    if size == was or what == CHANGES:
        return does
    unknown = " if the loss is a mean over samples" if splits.mean is None else ""
    norm = f", but for batch norm, whose statistics come from micro-batches of {size} samples then, not of {was}"
    return does + unknown + (norm if splits.batch_norm else "")


def short(before: Settings, after: Settings) -> str:
    """Return a few letters for a chart's mark: ``bf16, batch 64``."""
    return ", ".join(KNOBS[name].mark(value) for name, value in after.changed_from(before).items())
