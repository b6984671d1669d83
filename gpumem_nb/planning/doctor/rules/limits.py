"""Rules about what stops training: memory that runs out or is about to, steps that fail, ranks that differ."""

from __future__ import annotations

from ....report.advice import OF_FILLED
from ....report.differences import typed
from ....report.instead import LARGER
from ....shared.forecast import DRY, ERRORS
from ....shared.knobs.step import halved
from ....shared.units import format_bytes
from ...prediction import DOES_NOT_FIT, TIGHT
from ..evidence import Evidence
from ..finding import FIT, ROOM, STOPS, Finding

# With less than the error of a prediction without ranks (docs/prediction-cold.md) it could not be said beforehand
# that it fits: from there on what fills the memory is worth a word.
SCARCE = 1 / (1 + ERRORS[DRY])


def does_not_fit(evidence: Evidence) -> Finding | None:
    """The latest step ran out of memory, and nothing was changed since."""
    rescue = evidence.rescue
    if rescue is None or rescue.failure.kind != "oom" or rescue.goes_on == evidence.settings:
        return None
    failure, reading = rescue.failure, evidence.ranks[rescue.failure.rank].reading
    undone = "" if rescue.settings == evidence.settings else f" under {typed(evidence.settings, rescue.settings)}"
    back = f"; {rescue.did}" if rescue.did else ""
    waits = "What would fit is being tried out on the ranks: ask again in a moment." if rescue.looking else ""
    fitting = [fit.settings for fit in rescue.fitting]
    reason = rescue.instead.reason(evidence.settings) if rescue.instead and fitting else ""
    cause = OF_FILLED.get(failure.filled, "")  # a sample that is too large is a finding of its own
    helps = waits or (f"{cause} {reason}".strip() if reason else rescue.ways)
    smaller = halved(fitting[-1]) if fitting else None  # what fitted for a step may leave no room
    return Finding(
        "does not fit",
        "A step ran out of memory",
        STOPS,
        3,
        f"Step {rescue.step} ran out of memory on rank {failure.rank}{undone}{back}.",
        {
            "limit_bytes": reading.limit_bytes if reading else None,
            "asked_for_bytes": failure.asked_bytes,
            "free_bytes": failure.free_bytes,
            "in": f"{failure.phase} {failure.module}".strip(),
        },
        do=helps,
        candidates=evidence.possible([*fitting, *([smaller] if smaller else [])]),
        wants=FIT,
    )


def step_fails(evidence: Evidence) -> Finding | None:
    """The latest step raised something else, and none was done since."""
    rescue = evidence.rescue
    if rescue is None or rescue.failure.kind != "error" or evidence.steps >= rescue.step:
        return None
    return Finding(
        "a step fails",
        "A step failed",
        STOPS,
        5,
        f"Step {rescue.step}: {rescue.headline}",
        {"rank": rescue.failure.rank, "in": f"{rescue.failure.phase} {rescue.failure.module}".strip()},
        do="The step was undone on all ranks. Fix the code in a %%hvd cell, then try one step: %hvd_train 1.",
    )


def paused(evidence: Evidence) -> Finding | None:
    """Training stopped by itself, but for no step that was discarded: ranks came apart, or an evaluation failed."""
    *first, last = evidence.stopped_for.splitlines() or [""]
    said, helps = (" ".join(first), last) if first else (last, "")
    if not said:
        return None
    return Finding(
        "training paused",
        "Training stopped by itself",
        STOPS,
        6,
        f"After step {evidence.steps:,}: {said}",
        {"steps done": evidence.steps},
        do=helps,
    )


def ranks_differ(evidence: Evidence) -> Finding | None:
    """Weights are not the same on all ranks."""
    rescue = evidence.rescue
    if rescue is None or rescue.failure.kind != "diverged":
        return None
    return Finding(
        "ranks differ",
        "The ranks no longer hold the same weights",
        STOPS,
        4,
        rescue.headline,
        {"since step": rescue.step},
        do="%hvd_sync gives all ranks what rank 0 holds; find the cell that changed one rank alone.",
    )


def barely_fits(evidence: Evidence) -> Finding | None:
    """So little room is left that a longer sample, an evaluation or a cell may take it."""
    needs, share, peak = evidence.needs, evidence.share, evidence.peak
    if needs is None or share is None or peak is None or evidence.wastes or does_not_fit(evidence):
        return None
    if needs.verdict not in (TIGHT, DOES_NOT_FIT) or (needs.runs and not needs.measured):
        return None  # small steps say less than those that ran
    unknown, instead = needs.lower_bound, evidence.instead
    reserved, limit = needs.in_words(needs.reserved_peak_bytes), format_bytes(needs.limit_bytes)
    most = "" if unknown else f", most of it for {peak.largest}"
    then = (
        "it is predicted to run out of memory."
        if needs.verdict == DOES_NOT_FIT
        else needs.sample or "a longer sample, an evaluation or a cell may take what is left."
    )
    return Finding(
        "barely fits",
        "There is almost no memory left",
        STOPS,
        1,
        f"A step needs {reserved} of {limit} on the rank with least room{most}: {then}",
        {
            "reserved_peak_bytes": needs.reserved_peak_bytes,
            "limit_bytes": needs.limit_bytes,
            "share of the limit": share,
            "at most_bytes": needs.high_bytes,
        }
        if not unknown
        else {"at least_bytes": needs.low_bytes, "limit_bytes": needs.limit_bytes},
        do=instead.reason(evidence.settings) if instead else LARGER,
        candidates=evidence.possible(fit.settings for fit in instead.offers) if instead else (),
        wants=ROOM,
    )
