"""A report of a step that a rank could not finish, and of what was done about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..shared.messages import Failure
from ..shared.settings import Settings
from ..shared.units import format_bytes
from .differences import typed
from .freed import held_by_cells

TRIALS_NAMED = 5


@dataclass(frozen=True, slots=True)
class Fit:
    """Settings in place of some that ran out of memory.

    ``peak_bytes``: live, worst rank; ``None`` where they do not fit. ``barely``: the limit lies within the error.
    """

    settings: Settings
    peak_bytes: int | None
    barely: bool = False


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
        trials: what was tried afterwards, each for the step that had failed, which was undone.
        now: the settings in force since, from which commands lead to what was tried; ``None``: those it ran under.
        ranks: how many there are.
    """

    failure: Failure
    step: int
    settings: Settings
    did: str = ""
    goes_on: Settings | None = None
    foreseen: list[Fit] = field(default_factory=list)
    looking: bool = False
    trials: list[Fit] = field(default_factory=list)
    now: Settings | None = None
    ranks: int = 1

    @property
    def headline(self) -> str:
        """Return which rank could not do what, and why."""
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
        """Return what was tried out and fits, the mildest first."""
        return [trial for trial in self.trials if trial.peak_bytes is not None and not trial.barely]

    @property
    def fits(self) -> list[str]:
        """The flips that would have made it fit, as they were measured."""
        return self._flips_to(self.fitting)

    def _flips_to(self, fits: Sequence[Fit]) -> list[str]:
        return [f"{self._typed(fit.settings)} ({self._brings(fit)})" for fit in fits]

    def _typed(self, settings: Settings) -> str:
        """Return what leads from the settings in force to these."""
        return typed(self.now or self.settings, settings) or "the settings in force"

    def _brings(self, fit: Fit) -> str:
        said = f"live peak {format_bytes(fit.peak_bytes)}"
        before, after = (self.ranks * one.samples_per_rank for one in (self.settings, fit.settings))
        return said if before == after else f"{said}; the global batch becomes {after} instead of {before}"

    @property
    def advice(self) -> str:
        """Return the cause, and which flips would have helped; empty where the failure is not about memory."""
        if self.failure.kind != "oom":
            return ""
        cells = held_by_cells(self.failure.live) if self.failure.live else ""
        return f"{cells}. {self.ways}".strip() if cells else self.ways

    @property
    def ways(self) -> str:
        """Return which flips would have helped, or that none of those tried would have."""
        if self.goes_on:
            peaks = [format_bytes(trial.peak_bytes) for trial in self.trials]
            return f"With it the step fits (live peak {peaks[-1]})." if peaks else ""
        if self.fits:
            found = f"Tried out on the ranks, these would have fit: {'; '.join(self.fits)}."
            return self._and_cause(f"{found}{self._command(self.fitting[0])}")
        if self.looking:
            known = [trial.settings for trial in self.trials]
            hopeful = self._flips_to([fit for fit in self.foreseen if fit.settings not in known])
            predicted = f"Predicted to fit: {'; '.join(hopeful)}. " if hopeful else ""
            return self._and_cause(f"{predicted}What would have fit is being tried out on the ranks.")
        barely = [trial for trial in self.trials if trial.barely]
        if barely:
            found = f"Tried out on the ranks, only these would have fit, barely: {'; '.join(self._flips_to(barely))}."
            return self._and_cause(f"{found}{self._command(barely[-1])}")
        larger = "Use a smaller model or a larger limit."
        if not self.trials and self.now not in (None, self.settings):
            return self.failure.sample  # what training went back to fits
        if not self.trials:
            return self._and_cause(larger)
        tried = [typed(self.settings, trial.settings) for trial in self.trials]
        if len(tried) > TRIALS_NAMED:
            tried = [*tried[: TRIALS_NAMED - 1], f"and so on down to {tried[-1]}"]
        return self._and_cause(f"Tried out on the ranks, none of these would have fit: {'; '.join(tried)}. {larger}")

    def _command(self, fit: Fit) -> str:
        command = typed(self.now or self.settings, fit.settings)
        return f" Type %hvd_set {command}" if command else ""

    def _and_cause(self, said: str) -> str:
        """Return the same below a sample that is the cause: the command stands last."""
        return f"{self.failure.sample} {said}" if self.failure.sample else said

    def worked(self, settings: Settings, peak_bytes: int) -> None:
        """A step was done under these settings."""
        if settings == self.goes_on and not self.trials:
            self.trials.append(Fit(settings, peak_bytes))

    def __str__(self) -> str:
        lines = [self.headline, f"The step was discarded on all ranks; {self.did}." if self.did else "", self.advice]
        return "\n".join(line for line in lines if line)
