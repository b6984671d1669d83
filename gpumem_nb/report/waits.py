"""Sentences on which ranks wait for which."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..shared.answers import Apart, Pulse, Waiting
from ..shared.units import name_ranks

WORTH_A_WORD_S = 2.0
STALL_S = 1.0  # the shortest limit; ranks that came apart without having waited did not stall
# Ranks free each other at the limit, give or take a pulse. A rank that waits this much longer will not be freed.
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class WaitReport:
    """A report of what some ranks do, what others wait for, and for how long."""

    text: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.text[:1].upper()}{self.text[1:]} for {self.seconds:.0f} s"


def now(pulses: Mapping[int, Pulse], pending: Sequence[int], size: int) -> WaitReport | None:
    """Return what takes long, and which ranks wait for which; ``None`` when requests are answered fast.

    Args:
        pulses: of the ranks that work on something for more than a second.
        pending: ranks that have not answered; one without a pulse may be stopped.
        size: number of ranks; those that are not pending have nothing to do.
    """
    if not pulses:
        return None
    waiting = {rank: pulse.waiting for rank, pulse in pulses.items()}
    wait_report = _wait_report(
        waiting, _doing(pulses, pending, size), max(pulse.seconds for pulse in pulses.values()), _PRESENT
    )
    return wait_report if wait_report.seconds >= WORTH_A_WORD_S else None


def ended(
    apart: Mapping[int, Apart], pulses: Mapping[int, Pulse], pending: Sequence[int], size: int
) -> WaitReport | None:
    """Return which ranks waited until the ranks came apart; ``None`` if none did. ``apart``: the ranks' reports."""
    waiting = {rank: pulse.waiting for rank, pulse in pulses.items()} | {rank: of.left for rank, of in apart.items()}
    doing = _doing(pulses, pending, size) | {rank: f"in {of.doing}" for rank, of in apart.items()}
    wait_report = _wait_report(waiting, doing, 0.0, _PAST)
    return wait_report if wait_report.seconds >= STALL_S else None


def out_of_reach(pulses: Mapping[int, Pulse]) -> bool:
    """Return whether ranks still wait although they should have been freed, because a rank joins no collective.

    Each rank's own limit counts: a new one reaches a rank only after the request that it waits in.
    """
    return any(pulse.waiting and pulse.waiting.seconds > pulse.limit_s + TIMEOUT_S for pulse in pulses.values())


_PRESENT = (("is", "are"), ("waits", "wait"))
_PAST = (("was", "were"), ("waited", "waited"))


def _doing(pulses: Mapping[int, Pulse], pending: Sequence[int], size: int) -> dict[int, str]:
    doing = {rank: "not responding" if rank in pending else "idle" for rank in range(size)}
    fresh = {rank: pulse for rank, pulse in pulses.items() if time.time() - pulse.time_s < TIMEOUT_S}
    return doing | {rank: f"in {pulse.doing}" for rank, pulse in fresh.items()}


def _wait_report(
    waiting: Mapping[int, Waiting | None],
    doing: Mapping[int, str],
    seconds: float,
    verbs: tuple[tuple[str, str], tuple[str, str]],
) -> WaitReport:
    waits: dict[str, list[int]] = defaultdict(list)
    busy: dict[str, list[int]] = defaultdict(list)
    longest_s = 0.0
    for rank, what in doing.items():
        wait = waiting.get(rank)
        if wait and wait.seconds > 0:
            waits[f"in {_collective(wait.collective, what)}"].append(rank)
            longest_s = max(longest_s, wait.seconds)
        else:
            busy[what].append(rank)
    parts = [
        f"{name_ranks(ranks)} {singular if len(ranks) == 1 else plural} {what}"
        for (singular, plural), of in zip(verbs, (busy, waits), strict=True)
        for what, ranks in of.items()
    ]
    return WaitReport(", ".join(parts), longest_s or seconds)


def _collective(collective: str, doing: str) -> str:
    """Return a collective for people: the trainer's own have names that tell them nothing."""
    if "gpumem_nb.bucket." in collective or "'gpumem_nb.ballot'" in collective:  # waited for before any bucket
        return f"the gradient reduction of {doing[max(doing.rfind('step'), 0) :].removeprefix('in ')}"
    if "'gpumem_nb.shares." in collective:
        return "the all-gather of updated weights"
    if "'gpumem_nb." in collective:
        return f"the agreement of all ranks in {doing.removeprefix('in ')}"
    return f"{collective} of {doing.removeprefix('in ')}"
