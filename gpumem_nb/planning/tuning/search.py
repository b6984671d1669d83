"""In which order settings are measured: first what should be fast, then knob by knob, then the best in turns.

What fits is foretold before anything is measured, so nothing is tried that is not expected to fit. Measuring is noisy,
and what comes over the machine meanwhile meets whatever is measured just then. So at last the best take turns with the
present settings, in alternating order, and half of them are left out after every few rounds (successive halving;
Jamieson and Talwalkar 2016, "Non-stochastic best arm identification and hyperparameter optimization").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from ...shared.knobs import KNOBS
from ...shared.settings import Settings
from .record import Candidate, Record, speed_of
from .space import SPLIT, Space

_DECIDE = ("checkpointing", "precision")  # how large a micro-batch may be; all of the second with each of the first
_UPDATE = "optimizer_impl"  # decides what the update needs
_FIRST = ("bf16", "fp16")  # where both can be used, the second needs its losses scaled
_SEARCHING = 0.6  # of the time, before the best take turns
_FINALISTS, _WITHIN = 4, 2.0  # no other program slows a turn down by more than this factor, as a rule
WORTH = 1.02  # times the speed of what there is: less is not worth other settings
_ROUNDS = 3  # before half of the finalists are left out, and in the end as many again

T = TypeVar("T")


class Trials(Protocol):
    """Interface to whatever runs trial steps: the ranks, or a simulation in tests.

    Attributes:
        record: what came of it.
    """

    record: Record

    def fits(self, settings: Settings) -> bool:
        """Return whether these settings fit; asked of the ranks once."""

    def measure(self, settings: Settings) -> None:
        """Take some steps under settings that fit, which are undone, and keep their samples/s as one more turn."""

    def time_spent(self) -> float:
        """Return the share of the time that is gone."""

    def time_for(self, settings: Settings) -> bool:
        """Return whether they can be measured before the time is over, as far as can be told from what others took."""


def in_rounds(candidates: Sequence[T], rounds: int, stays: Callable[[T], bool]) -> Iterator[T]:
    """Give each candidate a turn in each round, in alternating order, so that what comes over the machine meets all.

    After a round those that do not stay have no more turns; with less than two left it ends.
    """
    left = list(candidates)
    for _ in range(rounds):
        yield from left
        left = [one for one in reversed(left) if stays(one)]
        if len(left) < 2:
            return


def search(space: Space, trials: Trials) -> None:
    """Measure until the fastest is known or the time is over; what is found is in the record of ``trials``."""
    for settings in _screening(space, trials):
        measured = len(trials.record.measured)
        over = measured > 1 and trials.time_spent() >= _SEARCHING
        if measured and (over or not trials.time_for(settings)):  # one answer comes in any case
            break
        trials.measure(settings)
    if not trials.record.measured:
        _rest(space, trials)
    _decide(space.start, trials)


def _rest(space: Space, trials: Trials) -> None:
    """Whatever fits at all, the smallest micro-batches first."""
    for settings in _fitting(sorted(space.candidates, key=_size), trials):
        if trials.record.candidates[settings].untried:
            trials.measure(settings)
        if trials.record.candidates[settings].usable:
            return


def _screening(space: Space, trials: Trials) -> Iterator[Settings]:
    """First the present settings, if they fit; then the largest micro-batch that fits under each combination of those
    knobs that decide it; from the fastest of these on, each value of the other knobs; at last smaller micro-batches.
    """
    start = yield from _start(space, trials)
    together = [name for name in _DECIDE if name in space.knobs]
    for values in itertools.product(*([getattr(start, name), *_others(name, start)] for name in together)):
        wanted = dict(zip(together, values, strict=True))
        if not _too_slow(space, wanted, trials.record):
            yield from _largest(space, wanted, start, trials)
    for name in space.knobs:
        base = trials.record.fastest
        if base and name not in (*_DECIDE, *SPLIT):
            for value in _others(name, base.settings):
                yield from _largest(space, {name: value}, base.settings, trials, fastest=True)
    if base := trials.record.fastest:
        most = base.settings.batch_size
        smaller = [one for one in space.other_splits(base.settings) if most / 4 <= one.batch_size < most]
        for one in _fitting(sorted(smaller, key=_size, reverse=True), trials):
            if trials.record.candidates[one].untried:
                yield one


def _start(space: Space, trials: Trials) -> Generator[Settings, None, Settings]:
    """Yield the present settings; if their update needs too much, first other ways to compute it: no split helps."""
    start, record = space.start, trials.record
    if trials.fits(start):
        yield start
    elif _UPDATE in space.knobs and start in record.candidates and record.candidates[start].predicted.phase == "update":
        for value in _others(_UPDATE, start):
            yield from _largest(space, {_UPDATE: value}, start, trials)
        if best := record.fastest:
            return start.replace(**{_UPDATE: getattr(best.settings, _UPDATE)})
    return start


def _too_slow(space: Space, wanted: Mapping[str, object], record: Record) -> bool:
    """Return whether these values cannot be the fastest, judged by the same precision without checkpointing.

    Checkpointing only adds to a step, and micro-batches n times as large are at most n times as fast.
    """
    best, most = record.fastest, max(map(_size, space.candidates))
    if best is None or wanted.get("checkpointing", "none") == "none":
        return False
    plain = {**wanted, "checkpointing": "none"}
    alike = [one for one in record.measured if _matches(one.settings, plain)]
    return any(speed_of(one) * most / _size(one.settings) < speed_of(best) for one in alike)


def _others(name: str, settings: Settings) -> list[object]:
    others = [value for value in KNOBS[name].choices if value != getattr(settings, name)]
    return sorted(others, key=lambda value: _FIRST.index(value) if value in _FIRST else -1)


def _largest(
    space: Space, values: Mapping[str, object], base: Settings, trials: Trials, fastest: bool = False
) -> Iterator[Settings]:
    """Yield the largest micro-batch that fits with these values, everything else as in ``base``; nothing if none does.

    That of ``base`` comes first if that is the ``fastest`` so far. Where whole steps of one do not go well, or it is
    tight and so may not be the answer, the next smaller one.
    """
    like = [one for one in space.candidates if _matches(one, values) and _near(one, base, values)]
    first = base.batch_size if fastest else None
    for one in _fitting(sorted(like, key=lambda one: (_size(one) == first, _size(one)), reverse=True), trials):
        candidate = trials.record.candidates[one]
        if candidate.untried:
            yield one
        if candidate.usable and not candidate.tight:
            return


def _matches(one: Settings, values: Mapping[str, object]) -> bool:
    return all(getattr(one, name) == value for name, value in values.items())


def _near(one: Settings, base: Settings, values: Mapping[str, object]) -> bool:
    return set(one.changed_from(base)) <= {*values, *SPLIT}


def _size(settings: Settings) -> int:
    size: int = settings.batch_size
    return size


def _fitting(candidates: Iterable[Settings], trials: Trials) -> Iterator[Settings]:
    """Those that fit, as long as there is time to ask."""
    for settings in candidates:
        if not trials.time_for(settings):
            return
        if trials.fits(settings):
            yield settings


def _decide(start: Settings, trials: Trials) -> None:
    """Let the best take turns with what they are compared with, and half of them at a time leave."""
    record = trials.record
    left = sorted(record.contenders, key=speed_of, reverse=True)[:_FINALISTS]
    left = [one for one in left if speed_of(one) * _WITHIN >= speed_of(left[0])]
    now = record.candidates.get(start)
    if now in record.measured and now not in left:
        left[_FINALISTS - 1 :] = [now]
    while len(left) > 1:
        for one in in_rounds(left, _ROUNDS, lambda one: one.usable):
            if not trials.time_for(one.settings):
                return
            trials.measure(one.settings)
        ranked = sorted((one for one in left if one.usable), key=speed_of, reverse=True)
        if len(ranked) <= 2:
            return
        kept: list[Candidate] = ranked[: (len(ranked) + 1) // 2]
        left = [*kept[:-1], now] if now in ranked and now not in kept else kept
