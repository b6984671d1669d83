"""Settings: all knobs together, validated on the way in; lighter ones, and the learning rate that they ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import InvalidInput, StateFileError, WorkloadError
from .knobs import CHANGES, KNOBS, additional
from .knobs.knob import MATHEMATICS, Changes, Knob, Need
from .values import Values


class Settings(Values):
    """Everything that can be switched between two steps, read by the names of the knobs: ``settings.batch_size``.

    ``batch_size`` counts samples of one micro-batch on one rank; the global batch is
    ``batch_size × accumulation_steps × ranks``. ``learning_rate`` and ``clip_norm`` are plain numbers
    (``clip_norm=None`` switches clipping off).
    """

    __slots__ = ()
    table = KNOBS

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any], path: Path) -> Settings:
        """Return what the state file at ``path`` holds, which an earlier version may have written.

        Raises:
            StateFileError: a knob or value that is not known here.
        """
        try:
            return cls(**{name: KNOBS[name].from_saved(v) if name in KNOBS else v for name, v in saved.items()})
        except InvalidInput as error:
            raise StateFileError(f"{path} holds settings that are not known here. {error}") from None

    @property
    def in_short(self) -> str:
        """The knobs that the panel shows at first, those not at their defaults, and how to see the others."""
        shown = [knob for name, knob in KNOBS.items() if knob.in_front or name in self._changed]
        told = " ".join(f"{knob.name}={knob.text(getattr(self, knob.name))}" for knob in shown)
        others = len(KNOBS) - len(shown)
        at_defaults = f"{others} others are at their defaults" if others > 1 else f"{others} other is at its default"
        return f"{told}\n({at_defaults}: %hvd_set shows all)" if others else told

    def saved(self) -> dict[str, Any]:
        """Return what a state file holds of them.

        An additional knob is named only where it differs from its default: ranks without it can use the file then.
        """
        unneeded = {knob.name for knob in additional()} - self._changed.keys()
        return {name: value for name, value in self.as_dict().items() if name not in unneeded}

    def mathematics(self, before: Settings) -> str:
        """Return the effect of a flip from ``before``: ``keeps``, ``keeps to rounding`` or ``changes``."""
        of_knobs = (KNOBS[name].mathematics_of(before, self) for name in self.changed_from(before))
        return max(of_knobs, key=MATHEMATICS.index, default=MATHEMATICS[0])

    def same_mathematics(self, other: Settings) -> bool:
        """Return whether training goes the same way under both, to rounding."""
        return self.mathematics(other) != CHANGES

    def check_known(self) -> None:
        """Refuse knobs that were registered in the process that sent these settings, but not in this one.

        Raises:
            WorkloadError: there are some.
        """
        if unknown := self._changed.keys() - KNOBS.keys():
            raise WorkloadError(
                f"the knob {min(unknown)!r} was registered in the notebook, but not on the ranks. Register it there "
                "too: session.run(function) calls a function on all of them, and %hvd_restart does it by itself."
            )

    def check_together(self, ranks: int) -> None:
        """Refuse knobs that do not go together on so many ranks, whatever is trained.

        Raises:
            InvalidInput: saying why, and what is allowed.
        """
        for knob in KNOBS.values():
            if knob.conflicts and (why_not := knob.conflicts(self, ranks)):
                raise InvalidInput(why_not)

    @property
    def samples_per_rank(self) -> int:
        """Samples one rank sees in one optimizer step."""
        samples: int = self.batch_size * self.accumulation_steps
        return samples


def strongest_first(need: Need) -> list[Changes]:
    """Those of the knobs that move most of the category come first."""
    return _changes(need, lambda knob: -knob.moves[need.category])


def mildest_first(need: Need) -> list[Settings]:
    """Return the settings after each change: first those that keep the mathematics, then those that move little."""
    changed = [need.settings.replace(**changes) for changes in _changes(need, lambda knob: knob.moves[need.category])]
    return sorted(changed, key=lambda after: not after.same_mathematics(need.settings))


def _changes(need: Need, order: Callable[[Knob], int]) -> list[Changes]:
    able = [knob for knob in KNOBS.values() if need.category in knob.moves]
    return [changes for knob in sorted(able, key=order) if knob.lighter for changes in knob.lighter(need)]


OWN = "own"
Schedule = tuple[str, int]


def learning_rate(settings: Settings, done: int, ranks: int) -> float:
    """Return the first group's rate for the next step, ``done`` steps into its schedule, on so many ranks.

    With ``lr_schedule=constant``, no warm-up and ``lr_scaling=none`` it is the knob itself, bit for bit.
    """
    rate: float = settings.learning_rate
    return rate * batch_factor(settings, ranks) * schedule_factor(settings, done)


def batch_factor(settings: Settings, ranks: int) -> float:
    """Return the factor by which the rate follows the global batch away from the one it was chosen for.

    ``linear``: Goyal et al. 2017 (arXiv 1706.02677), section 2.1. ``sqrt``: Krizhevsky 2014 (arXiv 1404.5997), section
    5; for Adam, Malladi et al. 2022 (arXiv 2205.10287).
    """
    if settings.lr_scaling == "none" or settings.reference_batch is None:
        return 1.0
    ratio = settings.samples_per_rank * ranks / settings.reference_batch
    return math.sqrt(ratio) if settings.lr_scaling == "sqrt" else ratio


def schedule_factor(settings: Settings, done: int) -> float:
    """Return the share of the full rate at which a step runs.

    The warm-up is that of torch's ``LinearLR(start_factor=1 / (W + 1), total_iters=W)``, what follows it that of
    ``CosineAnnealingLR(T)`` or of ``LinearLR(1, 0, T)`` with the steps T that are left; then it stays at 0.
    """
    warmup = settings.warmup_steps
    if settings.lr_schedule == OWN:
        return 1.0
    if done < warmup:
        return float((done + 1) / (warmup + 1))
    if settings.lr_schedule == "constant" or settings.schedule_steps is None:
        return 1.0
    share = min(1.0, (done - warmup) / max(1, settings.schedule_steps - warmup))
    return (1 + math.cos(math.pi * share)) / 2 if settings.lr_schedule == "cosine" else 1 - share


def schedule_of(settings: Settings) -> Schedule:
    """Return what makes a schedule another one, which begins with the next step. A longer or shorter one goes on."""
    return settings.lr_schedule, settings.warmup_steps
