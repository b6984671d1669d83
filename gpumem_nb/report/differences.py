"""How one setting differs from another, in words. Empty where they are the same."""

from __future__ import annotations

from ..shared.knobs import CHANGES, KEEPS, KEEPS_TO_ROUNDING, KNOBS
from ..shared.knobs.values import Kind
from ..shared.settings import Settings

DOES = {
    KEEPS: "keeps the mathematics",
    KEEPS_TO_ROUNDING: "keeps the mathematics to rounding",
    CHANGES: "changes the mathematics",
}


def typed(before: Settings, after: Settings) -> str:
    """What to type after ``%hvd_set`` to get from one to the other: ``batch_size=16 accumulation_steps=2``."""
    changed = after.changed_from(before)
    return " ".join(f"{name}={KNOBS[name].text(value)}" for name, value in changed.items())


def arrows(before: Kind, after: Kind) -> str:
    """Both values of what was changed, of settings or of a policy: ``precision fp32 → bf16, batch_size 32 → 64``."""
    changed = [(after.table[name], value) for name, value in after.changed_from(before).items()]
    return ", ".join(f"{one.name} {one.text(getattr(before, one.name))} → {one.text(v)}" for one, v in changed)


def mathematics(before: Settings, after: Settings, batch_norm: bool = False) -> str:
    """What the change does to the mathematics: ``changes the mathematics (precision, batch_size)``.

    ``batch_norm``: whether the model takes statistics from micro-batches.
    """
    what = after.mathematics(before)
    names = [name for name in after.changed_from(before) if KNOBS[name].mathematics_of(before, after) == CHANGES]
    does = DOES[what] + (f" ({', '.join(names)})" if names else "")
    size, was = after.batch_size, before.batch_size
    if not batch_norm or size == was or what == CHANGES:
        return does
    return f"{does}, but for batch norm, whose statistics come from micro-batches of {size} samples then, not of {was}"


def short(before: Settings, after: Settings) -> str:
    """A few letters for a chart's mark: ``bf16, batch 64``."""
    return ", ".join(KNOBS[name].mark(value) for name, value in after.changed_from(before).items())
