"""What became of a step that some rank could not finish, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..shared.messages import Failure
from ..shared.settings import Settings
from ..shared.units import format_bytes
from .differences import typed

TRIALS_NAMED = 5


@dataclass(frozen=True, slots=True)
class Fit:
    """Settings in place of some that ran out of memory. ``peak_bytes``: live, worst rank; ``None``: no fit."""

    settings: Settings
    peak_bytes: int | None


@dataclass(slots=True)
class Rescue:
    """One discarded step.

    Attributes:
        failure: what the first rank that failed said.
        step: the number the step would have had.
        settings: what it ran under.
        did: what was done about it.
        goes_on: the smaller micro-batches that training went on with.
        foreseen: what was predicted to fit before the step was taken.
        looking: whether it is still being found out what would have fit.
        trials: what was tried afterwards, each for one step that was undone.
        untried: what would have taken longer than there was time for.
    """

    failure: Failure
    step: int
    settings: Settings
    did: str = ""
    goes_on: Settings | None = None
    foreseen: list[Fit] = field(default_factory=list)
    looking: bool = False
    trials: list[Fit] = field(default_factory=list)
    untried: list[Settings] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """Who could not do what, and why."""
        failure = self.failure
        if failure.kind == "diverged":
            return failure.message
        if failure.phase == "settings":
            return f"These settings cannot be used: {failure.message}"
        where = "in the evaluation" if failure.phase == "evaluation" else f"in the {failure.phase} part of the step"
        if failure.module:
            where += f", in {failure.module}"
        if failure.kind != "oom":
            return f"rank {failure.rank} failed {where}: {failure.message}"
        if failure.asked_bytes is None:
            return f"rank {failure.rank} ran out of memory {where}: {failure.message}"
        free = "" if failure.free_bytes is None else f" with {format_bytes(failure.free_bytes)} free"
        asked = format_bytes(failure.asked_bytes)
        return f"rank {failure.rank} ran out of memory {where}: Tried to allocate {asked}{free}."

    @property
    def fitting(self) -> list[Fit]:
        """What was tried out and fits, the mildest first."""
        return [trial for trial in self.trials if trial.peak_bytes is not None]

    @property
    def fits(self) -> list[str]:
        """The flips that would have made it fit, as they were measured."""
        return self._flips_to(self.fitting)

    def _flips_to(self, fits: Sequence[Fit]) -> list[str]:
        return [f"{typed(self.settings, fit.settings)} (live peak {format_bytes(fit.peak_bytes)})" for fit in fits]

    @property
    def advice(self) -> str:
        """Which flips would have helped; empty where the failure is not about memory."""
        if self.failure.kind != "oom":
            return ""
        if self.goes_on:
            peaks = [format_bytes(trial.peak_bytes) for trial in self.trials]
            return f"With it the step fits (live peak {peaks[-1]})." if peaks else ""
        if self.fits:
            found = f"Tried out on the ranks, these would have fit: {'; '.join(self.fits)}."
            return f"{found} Type %hvd_set {typed(self.settings, self.fitting[0].settings)}"
        if self.looking:
            known = [trial.settings for trial in self.trials]
            hopeful = self._flips_to([fit for fit in self.foreseen if fit.settings not in known])
            predicted = f"Predicted to fit: {'; '.join(hopeful)}. " if hopeful else ""
            return f"{predicted}What would have fit is being tried out on the ranks."
        larger = "Use a smaller model or a larger limit."
        untried = f"There was no time to try {typed(self.settings, self.untried[0])}. " if self.untried else ""
        if not self.trials:
            return untried + larger
        tried = [typed(self.settings, trial.settings) for trial in self.trials]
        if len(tried) > TRIALS_NAMED:
            tried = [*tried[: TRIALS_NAMED - 1], f"and so on down to {tried[-1]}"]
        return f"Tried out on the ranks, none of these would have fit: {'; '.join(tried)}. {untried}{larger}"

    def worked(self, settings: Settings, peak_bytes: int) -> None:
        """A step was done under these settings."""
        if settings == self.goes_on and not self.trials:
            self.trials.append(Fit(settings, peak_bytes))

    def __str__(self) -> str:
        lines = [self.headline, f"The step was discarded on all ranks; {self.did}." if self.did else "", self.advice]
        return "\n".join(line for line in lines if line)
