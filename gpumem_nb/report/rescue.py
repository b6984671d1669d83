"""A report of a step that a rank could not finish, and of what was done about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..shared.errors import RankError, Stalled, TrialFailed
from ..shared.messages import Failure
from ..shared.settings import Settings
from ..shared.units import format_bytes
from .advice import OF_FILLED
from .freed import held_by_cells
from .instead import LARGER, Fit, Instead

_UNTRIED = (
    "Nothing lighter was tried out, because the ranks had come apart: one waited in a collective for this one. "
    "%hvd_ladder looks for what fits."
)
_FURTHER = "To look further, also at other optimizers: %hvd_ladder"


def headline(failure: Failure) -> str:
    """Return which rank could not do what, and why."""
    if failure.kind == "diverged":
        return failure.message
    if failure.phase == "settings":
        where = "" if failure.everywhere else f" on rank {failure.rank}"
        return f"These settings cannot be used{where}: {failure.message}"
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


def stalled(error: RankError, what: str, failed: TrialFailed | None) -> RankError:
    """Return the error to raise for that of the first rank.

    Args:
        what: a sentence on who waited for whom; empty if no rank waited.
        failed: what failed on the rank that others waited for, in a step of a question.
    """
    if failed:
        return Stalled(failed, f"{headline(failed.failure)}\n{what}".rstrip())
    return Stalled(error, what) if what else error


@dataclass(slots=True)
class Rescue:
    """One discarded step.

    Attributes:
        failure: what the first rank that failed said.
        step: the number the step would have had.
        settings: what it ran under.
        did: what was done about it.
        goes_on: the smaller micro-batches that training went on with.
        went_bytes: the live peak of the first step with these; 0 before it was done.
        foreseen: what was predicted to fit before the step was taken.
        looking: whether it is still being found out what would have fit.
        instead: what to train with in its place, as far as that was tried out on the step that had failed.
        now: the settings in force since, from which commands lead to what was tried; ``None``: those it ran under.
        apart: the ranks came apart in it, so that nothing could be tried out.
        ranks: how many there are.
        model_version: of the model that it is about; see ``History``.
    """

    failure: Failure
    step: int
    settings: Settings
    did: str = ""
    goes_on: Settings | None = None
    went_bytes: int = 0
    foreseen: list[Fit] = field(default_factory=list)
    looking: bool = False
    instead: Instead | None = None
    now: Settings | None = None
    apart: bool = False
    ranks: int = 1
    model_version: int = 0

    @property
    def headline(self) -> str:
        """Return which rank could not do what, and why."""
        return headline(self.failure)

    @property
    def fitting(self) -> tuple[Fit, ...]:
        """Return what was tried out and fits: the fastest, then what frees most."""
        return self.instead.offers if self.instead else ()

    @property
    def fits(self) -> list[str]:
        """The flips that would have made it fit, as they were measured."""
        return [self.instead.named(fit, self._in_force) for fit in self.fitting] if self.instead else []

    @property
    def _in_force(self) -> Settings:
        return self.now or self.settings

    @property
    def advice(self) -> str:
        """Return the cause, and which flips would have helped; empty where the failure is not about memory."""
        if self.failure.kind != "oom":
            return ""
        return self._below_cells(self.ways)

    @property
    def reason(self) -> str:
        """Return the same where buttons below it say what would have fitted."""
        if self.goes_on or not (self.instead and self.fitting):
            return self.advice
        return self._below_cells(self._and_cause(self.instead.above_buttons))

    def _below_cells(self, said: str) -> str:
        cells = held_by_cells(self.failure.live) if self.failure.live else ""
        return f"{cells}. {said}".strip() if cells else said

    @property
    def ways(self) -> str:
        """Return which flips would have helped, or that none of those tried would have."""
        if self.goes_on:
            return f"With it the step fits (live peak {format_bytes(self.went_bytes)})." if self.went_bytes else ""
        found = self.instead
        if found and found.offers:
            return self._and_cause(found.words(self._in_force))
        if self.looking:
            named = Instead(self.settings, self.ranks)
            known = [one.settings for one in found.tried] if found else []
            hopeful = [named.named(fit, self._in_force) for fit in self.foreseen if fit.settings not in known]
            predicted = f"Predicted to fit: {'; '.join(hopeful)}. " if hopeful else ""
            return self._and_cause(f"{predicted}What would have fit is being tried out on the ranks.")
        if found:
            further = [] if found.unfinished or found.barely else [_FURTHER]
            return self._and_cause(" ".join([found.words(self._in_force), *further]))
        if self.now not in (None, self.settings):
            return self._and_cause("")  # what training went back to fits
        return self._and_cause(_UNTRIED if self.apart else LARGER)

    def _and_cause(self, said: str) -> str:
        """Return the same below what is the cause: the command stands last."""
        return " ".join(filter(None, [self.failure.sample, OF_FILLED.get(self.failure.filled, ""), said]))

    def worked(self, settings: Settings, peak_bytes: int) -> None:
        """A step was done under these settings."""
        if settings == self.goes_on and not self.went_bytes:
            self.went_bytes = peak_bytes

    def __str__(self) -> str:
        lines = [self.headline, f"The step was discarded on all ranks; {self.did}." if self.did else "", self.advice]
        return "\n".join(line for line in lines if line)
