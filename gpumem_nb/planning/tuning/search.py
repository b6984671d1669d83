"""In which order settings are measured: one knob after the other, then what should be fastest, then the best in turns.

What fits is known before anything is measured, so nothing is tried that is not expected to fit. Measuring is noisy, and
what comes over the machine meanwhile meets whatever is measured just then. So at last the best take turns with the
present settings, in alternating order, and half of them are left out after every few rounds (successive halving;
Jamieson and Talwalkar 2016, "Non-stochastic best arm identification and hyperparameter optimization").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from ...shared.knobs import KNOBS
from ...shared.settings import Settings
from .effects import Effects
from .record import Candidate, Record, speed_of
from .space import SPLIT, Space

_SEARCHING = 0.6  # of the time, before the best take turns
_PROMISING = 0.95  # of the fastest so far, that a setting must be expected to reach
_IN_VAIN = 4  # settings measured one after the other without anything faster
_FINALISTS = 4
_ROUNDS = 3  # before half of the finalists are left out, and in the end as many again


class Trials(Protocol):
    """Who measures.

    Attributes:
        record: what came of it.
    """

    record: Record

    def fits(self, settings: Settings) -> bool:
        """Whether these settings fit; asked of the ranks once."""

    def measure(self, settings: Settings) -> None:
        """Take some steps under settings that fit, which are undone, and keep their samples/s as one more turn."""

    def time_spent(self) -> float:
        """The share of the time that is gone."""


def search(space: Space, present: Settings, trials: Trials) -> None:
    """Measure until the fastest is known or the time is over; what is found is in the record of ``trials``."""
    for settings in _screening(space, trials):
        if trials.time_spent() >= _SEARCHING:
            break
        trials.measure(settings)
    if trials.record.measured:
        _pursue(space, trials)
        _decide(present, trials)


def _screening(space: Space, trials: Trials) -> Iterator[Settings]:
    """Settings from which each knob's effect can be told, beginning with the present ones if they fit."""
    first = _first(space, trials)
    if first is None:
        return
    base = first
    yield base
    for one in _spread(list(_fitting(space.other_splits(base), trials))):
        if one != base:
            yield one
    best = trials.record.fastest
    base = best.settings if best else base
    for name in space.knobs:
        if name not in SPLIT:
            for value in KNOBS[name].choices:
                other = [one for one in space.candidates if _differs(one, base, name, value)]
                other.sort(key=lambda one: abs(math.log2(one.batch_size / base.batch_size)))
                if value != getattr(base, name) and (fitting := next(_fitting(other, trials), None)):
                    yield fitting


def _differs(one: Settings, base: Settings, name: str, value: object) -> bool:
    """Whether a knob has this value, and everything but the split of the batch is as in ``base``."""
    return getattr(one, name) == value and set(one.changed_from(base)) <= {name, *SPLIT}


def _first(space: Space, trials: Trials) -> Settings | None:
    """The present settings if they fit; else what differs least from them, in the largest micro-batches that fit."""

    def difference(settings: Settings) -> tuple[int, int]:
        return len(set(settings.changed_from(space.start)) - set(SPLIT)), -settings.batch_size

    if trials.fits(space.start):
        return space.start
    return next(_fitting(sorted(space.candidates, key=difference), trials), None)


def _fitting(candidates: Iterable[Settings], trials: Trials) -> Iterator[Settings]:
    """Those that fit, as long as there is time to ask."""
    for settings in candidates:
        if trials.time_spent() >= 1:
            return
        if trials.fits(settings):
            yield settings


def _spread(fitting: Sequence[Settings]) -> list[Settings]:
    """The largest micro-batch and a quarter of it, and so on, as far as there are such."""
    chosen: list[Settings] = []
    for one in sorted(fitting, key=lambda settings: -settings.batch_size):
        if not chosen or one.batch_size <= chosen[-1].batch_size / 4:
            chosen.append(one)
    return chosen


def _pursue(space: Space, trials: Trials) -> None:
    """Measure what should be fastest by what is known, until nothing better comes of it."""
    in_vain = 0
    while in_vain < _IN_VAIN and trials.time_spent() < _SEARCHING:
        looked_at = trials.record.candidates
        best = trials.record.fastest
        rates = {one.settings: speed_of(one) for one in trials.record.measured}
        effects = Effects(space.start, space.knobs, rates)
        left = [one for one in space.candidates if one not in looked_at or looked_at[one].untried]
        ranked = sorted(left, key=effects.samples_per_s, reverse=True)
        enough = _PROMISING * (speed_of(best) if best else 0.0)
        promising = (one for one in ranked if effects.samples_per_s(one) >= enough)
        chosen = next(_fitting(promising, trials), None)
        if chosen is None:
            return
        trials.measure(chosen)
        in_vain = 0 if best is None or speed_of(looked_at[chosen]) > speed_of(best) else in_vain + 1


def _decide(present: Settings, trials: Trials) -> None:
    """Let the best take turns with the present settings, and half of them at a time leave."""
    record = trials.record
    left = sorted(record.measured, key=speed_of, reverse=True)[:_FINALISTS]
    now = record.candidates.get(present)
    if now in record.measured and now not in left:
        left[-1:] = [now]
    while len(left) > 1:
        for _ in range(_ROUNDS):
            for one in list(left):
                if trials.time_spent() >= 1:
                    return
                trials.measure(one.settings)
            left = [one for one in reversed(left) if not one.failed]
        ranked = sorted(left, key=speed_of, reverse=True)
        if len(ranked) <= 2:
            return
        kept: list[Candidate] = ranked[: (len(ranked) + 1) // 2]
        left = [*kept[:-1], now] if now in ranked and now not in kept else kept
