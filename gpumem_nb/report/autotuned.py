"""What autotune found."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ..shared.settings import Settings
from ..shared.units import format_rate
from .differences import typed
from .speed import percent


@dataclass(frozen=True, slots=True)
class Autotuned:
    """The fastest settings that were found, beside those of the start.

    Attributes:
        before, after: samples/s of all ranks together in the rounds in which both took turns at the end; empty if
            nothing was found.
        tried: how many other settings were tried.
        impossible: those of them under which no step could be done, most often because memory ran out.
    """

    start: Settings
    found: Settings
    before: tuple[float, ...]
    after: tuple[float, ...]
    tried: int
    impossible: tuple[Settings, ...] = ()

    def __str__(self) -> str:
        changes = typed(self.start, self.found)
        tried = f"{self.tried} other settings were tried"
        if not changes:
            text = f"Autotune: none of {self.tried} other settings was clearly faster, so nothing was changed."
        else:
            ratios = sorted(after / before for before, after in zip(self.before, self.after, strict=True))
            speeds = f"{format_rate(statistics.median(self.after))} samples/s instead of " + format_rate(
                statistics.median(self.before)
            )
            spread = f"{percent(1, ratios[0])[:-2]} to {percent(1, ratios[-1])} in {len(ratios)} comparisons"
            text = f"Autotune set {changes}: {speeds} ({spread}; {tried})."
        if self.found.compression == "fp16" != self.start.compression:
            text += " compression=fp16 rounds gradients on their way: %hvd_set compression=none takes that back."
        if self.impossible:
            text += f" Not possible here: {', '.join(typed(self.start, one) for one in self.impossible)}."
        return text
