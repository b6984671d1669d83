"""What to train with in place of settings that do not fit, in words: the same on the card, in doctor, tuner, predict.

What is tried, and which of it is named, is decided in ``planning/instead.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..shared import categories as c
from ..shared.knobs import CHANGES, KNOBS
from ..shared.settings import Settings
from ..shared.units import format_bytes, format_rate
from ..shared.workload import Splits
from .differences import NOT_KNOWN, changes, mathematics, typed

TRIALS_NAMED = 4
LARGER = "Use a smaller model or a larger limit."

BESIDES = {
    c.PARAMETERS: "No knob changes what the weights take; a smaller model does.",
    c.GRADIENTS: "No knob changes what the gradients take: they are as large as the weights that are trained.",
    c.OPTIMIZER_STATE: "Fewer trained weights need less of it: freeze those that may stay "
    "(param.requires_grad_(False)) or train LoRA adapters, and build the optimizer on what is left.",
    c.COMMUNICATION: "No knob changes how many gradients are on their way at once.",
    c.ACTIVATIONS: "Shorter or smaller samples need fewer of them.",
    c.OTHER: "Training did not make it: look for tensors that cells and buffers of the model hold.",
}
"""By category, what makes it smaller and is no knob."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Settings in place of some that do not fit.

    Attributes:
        settings: which.
        peak_bytes: live, worst rank; ``None`` where they do not fit.
        barely: whether the limit lies within the error.
        samples_per_s: of all ranks, from whole steps; ``None`` where these were not timed.
        trial_s: what the step that had failed took under them, while it was recorded; ``None`` where that was not
            tried, or first of all, which warms up. It says only how others compare.
    """

    settings: Settings
    peak_bytes: int | None
    barely: bool = False
    samples_per_s: float | None = None
    trial_s: float | None = None

    @property
    def fits(self) -> bool:
        """Return whether they fit with room."""
        return self.peak_bytes is not None and not self.barely


@dataclass(frozen=True, slots=True)
class Instead:
    """The answer to settings that do not fit.

    Attributes:
        failed: these settings.
        ranks: how many train.
        fastest: of what fits at this global batch, and keeps the mathematics if anything does that; ``None`` where
            nothing fits.
        timed: whether it is known to be the fastest; else it is the mildest change.
        frees_most: of the same what needs least; ``None`` where that is the fastest.
        barely: what fits only within the error, that with the least memory; ``None`` where something fits with room.
        tried: all that was tried, in order.
        why: what fills the memory, in a sentence; empty where that is not known.
        largest: the category that fills most of it; empty where that is not known.
        on_the_step: whether it was the step that ran out of memory which was tried; else it is predicted.
        splits: what is known of training micro-batches in parts.
        unfinished: whether trying ended before something fitted or all was tried.
    """

    failed: Settings
    ranks: int
    fastest: Fit | None = None
    timed: bool = False
    frees_most: Fit | None = None
    barely: Fit | None = None
    tried: tuple[Fit, ...] = ()
    why: str = ""
    largest: str = ""
    on_the_step: bool = False
    splits: Splits = NOT_KNOWN
    unfinished: bool = False

    @property
    def offers(self) -> tuple[Fit, ...]:
        """Return what fits: the fastest, then what frees most."""
        return tuple(one for one in (self.fastest, self.frees_most) if one)

    def command(self, now: Settings) -> str:
        """Return what to type under the present settings; empty where nothing helps, or it is in use."""
        one = self.fastest or self.barely
        knobs = typed(now, one.settings) if one else ""
        return f"%hvd_set {knobs}" if knobs else ""

    def words(self, now: Settings) -> str:
        """Return the whole answer, what to type last."""
        command = self.command(now)
        return " ".join(filter(None, [self.reason(now), command and f"Type {command}"]))

    def reason(self, now: Settings) -> str:
        """Return the answer without what to type."""
        return " ".join(filter(None, [self.why, self._found(now)]))

    @property
    def above_buttons(self) -> str:
        """Return the answer where buttons below it name what fits."""
        assert self.fastest
        if self.frees_most:
            first = self._fastest.replace(", the", ": the first is the")
            said = f"these {self._would_fit}{first}; the second frees most"
        else:
            said = f"this {self._would_fit}{self._fastest}{because(self.failed, self.fastest.settings)}"
        return " ".join(filter(None, [self.why, f"{self._how}, {said}."]))

    def named(self, fit: Fit, now: Settings) -> str:
        """Return a flip, and what it brings."""
        return f"{typed(now, fit.settings) or 'the settings in force'} ({self._brings(fit)})"

    @property
    def _how(self) -> str:
        return "Tried out on the ranks" if self.on_the_step else "Predicted"

    @property
    def _would_fit(self) -> str:
        return "would have fit" if self.on_the_step else "would fit"

    def _found(self, now: Settings) -> str:
        fit = self._would_fit
        if self.fastest:
            said = [f"{self.named(self.fastest, now)}{self._fastest}{because(self.failed, self.fastest.settings)}"]
            if self.frees_most:
                most = because(self.failed, self.frees_most.settings)
                said.append(f"{self.named(self.frees_most, now)}, which frees most{most}")
            return f"{self._how}, {'these' if self.frees_most else 'this'} {fit}: {'; '.join(said)}."
        if self.barely:
            return f"{self._how}, only this {fit}, barely: {self.named(self.barely, now)}."
        helps = " ".join(filter(None, [BESIDES.get(self.largest, ""), LARGER]))
        if self.unfinished:
            helps = f"Others were not tried. Ask again: {f'%hvd_predict {typed(now, self.failed)}'.rstrip()}"
        if not self.tried:
            return helps
        tried = [typed(self.failed, one.settings) for one in self.tried]
        if len(tried) > TRIALS_NAMED:
            tried = [*tried[: TRIALS_NAMED - 1], f"and so on down to {tried[-1]}"]
        return f"{self._how}, none of these {fit}: {'; '.join(tried)}. {helps}"

    @property
    def _alone(self) -> bool:
        return sum(one.fits for one in self.tried) <= 1

    @property
    def _fastest(self) -> str:
        assert self.fastest
        if self.fastest.settings.samples_per_rank != self.failed.samples_per_rank:
            return ", while nothing that was tried at this global batch fits"
        if self._alone:
            return ""
        return ", the fastest at this global batch" if self.timed else ", the mildest change"

    def _brings(self, fit: Fit) -> str:
        said = f"live peak {format_bytes(fit.peak_bytes)}"
        if fit.samples_per_s:
            said += f", {format_rate(fit.samples_per_s)} samples/s"
        before, after = (self.ranks * one.samples_per_rank for one in (self.failed, fit.settings))
        if before != after:
            return f"{said}; the global batch becomes {after} instead of {before}"
        if changes(self.failed, fit.settings, self.splits) == CHANGES:
            return f"{said}; it {mathematics(self.failed, fit.settings, self.splits)}"
        return said


def because(before: Settings, after: Settings) -> str:
    """Return why the latter need less memory than the former, as a clause to append; empty where no knob says so."""
    changed = [name for name, value in after.changed_from(before).items() if _less(name, before, value)]
    *first, last = [why for name in changed if (why := KNOBS[name].saves)] or [""]
    said = f"{', '.join(first)} and {last}" if first else last
    return f", because {said}" if said else ""


def _less(name: str, before: Settings, value: Any) -> bool:
    """Return whether a value needs less than the one before: a smaller number, or a choice that is not the default."""
    was = getattr(before, name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return was is None or value < was
    return bool(value != KNOBS[name].default)
