"""Policy: what the session does by itself, and when. Changes no mathematics, so it is not part of the settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..shared.settings import Knob, positive, positive_or, whole
from ..shared.units import parse_size


def _seconds(value: Any) -> float:
    seconds = positive(value)
    if seconds < 1:
        raise ValueError(value)
    return seconds


def _steps_or(*words: str) -> Callable[[Any], int | str]:
    return lambda value: value if value in words else whole(value)


RULES: dict[str, Knob] = {
    "on_oom": Knob(
        "after an out-of-memory error: revert to the settings that worked, shrink the micro-batch and keep the global "
        "batch, or stop",
        choices=("revert", "shrink", "stop"),
    ),
    "stall_limit_s": Knob(
        "seconds that ranks wait for one another before they are freed",
        parse=_seconds,
        allowed="a number of seconds of at least 1, such as 30",
    ),
    "idle_minutes": Knob(
        "minutes without any work after which the session stops itself, or never",
        parse=positive_or("never"),
        allowed="a number of minutes above 0, such as 60, or never",
    ),
    "snapshot_steps": Knob(
        "steps between automatic snapshots; auto takes them as often as costs less than 1 % of the time",
        parse=_steps_or("auto", "never"),
        allowed="a whole number of at least 1, such as 100, or auto, or never",
    ),
    "snapshot_space": Knob(
        "disk space for automatic snapshots",
        parse=parse_size,
        allowed="a size, such as 4GiB",
    ),
    "ledger_steps": Knob(
        "how often the memory of a step is recorded by category: one step in this many, or never",
        parse=_steps_or("never"),
        allowed="a whole number of at least 1, such as 20, or never",
    ),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """What the session does by itself.

    ``stall_limit_s`` in seconds, ``idle_minutes`` in minutes (``None``: never), ``snapshot_steps`` a number, ``auto``
    or ``never``, ``snapshot_space`` in bytes, ``ledger_steps`` a number or ``never``.
    """

    on_oom: str = "revert"
    stall_limit_s: float = 30.0
    idle_minutes: float | None = 60.0
    snapshot_steps: int | str = "auto"
    snapshot_space: int = 4 * 2**30
    ledger_steps: int | str = 20

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            object.__setattr__(self, name, rule.check(name, getattr(self, name)))

    def replace(self, **rules: Any) -> Policy:
        """A copy with some rules changed; a value that cannot be used raises ``InvalidInput`` naming what can."""
        return dataclasses.replace(self, **rules)

    def __str__(self) -> str:
        return " ".join(f"{name}={getattr(self, name)}" for name in RULES)


assert tuple(field.name for field in dataclasses.fields(Policy)) == tuple(RULES)
