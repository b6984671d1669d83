"""Settings: all knobs together, immutable, validated on the way in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import InvalidInput, StateFileError, WorkloadError
from .knobs import CHANGES, KNOBS, additional
from .knobs.knob import MATHEMATICS
from .knobs.values import Values


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
