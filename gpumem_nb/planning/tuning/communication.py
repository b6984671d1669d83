"""Find Horovod's fastest settings for a model: try them in turns with the present ones, knob by knob."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterator, Sequence

from ...report.configurations import Autotuned
from ...shared.knobs.communication import BUCKET_MIB, COMPRESSION, CYCLE_TIME_MS, FUSION_THRESHOLD_MIB
from ...shared.settings import Settings
from .search import WORTH, in_rounds

_ROUNDS = 5
_CONFIRMING_ROUNDS = 7
_AT_MOST_AGAINST = 0.25  # of the rounds
_HOPELESS = 0.94  # of the present samples/s in the first round
_BUCKETS_MIB = (0.25, 1, 4, 16, 64)
_BUFFERS_MIB = (1, 4, 16, 64)
_LEAST_BUFFER_MIB = 16  # that ranks are started with
_CYCLES_MS = (0.5, 1, 2.5, 5, 10)

Search = Generator[Settings, float | None, Autotuned]
"""Gives settings to train under, takes their samples/s, or ``None`` where no step was possible, and ends with what was
found."""


def search(start: Settings, gradient_bytes: int, usable: Callable[[Settings], bool]) -> Search:
    """Look for faster settings than ``start``, of a model with so many bytes of gradients.

    One knob after another is tried, the others as they were found until then. Its values take turns in rounds, in
    alternating order, so that what changes on the machine meets all of them; a value must be faster in nearly all
    rounds, and what is not faster so far has no more turns. In the end all that was found takes turns with the start
    once more, which is what is told: the best of several looks better than it is.

    Args:
        usable: whether settings go with what is loaded.
    """
    best, tried, impossible = start, {start}, []
    for name, values in _ladders(start, gradient_bytes / 2**20):
        rivals = [rival for value in values if usable(rival := best.replace(**{name: value}))]
        if not rivals:
            continue
        tried.update(rivals)
        rates = yield from _in_turns([best, *rivals], _ROUNDS)
        impossible += [rival for rival in rivals if not rates[rival]]
        best = _fastest(best, rates)
    rates = yield from _in_turns([start, best], _CONFIRMING_ROUNDS if best != start else 0)
    if not rates[best] and best != start:
        impossible.append(best)
    found = _fastest(start, rates)
    if found == start:
        return Autotuned(start, start, (), (), len(tried) - 1, tuple(impossible))
    return Autotuned(start, found, tuple(rates[start]), tuple(rates[found]), len(tried) - 1, tuple(impossible))


def _in_turns(
    candidates: Sequence[Settings], rounds: int
) -> Generator[Settings, float | None, dict[Settings, list[float]]]:
    """Samples/s of each in each round; fewer of what is hopeless, none of what was impossible."""
    present = candidates[0]
    rates: dict[Settings, list[float]] = {settings: [] for settings in candidates}

    def goes_on(rival: Settings) -> bool:
        ratios = _ratios(rates[present], rates[rival])
        return rival == present or (bool(ratios) and statistics.median(ratios) > (1 if len(ratios) > 1 else _HOPELESS))

    for settings in in_rounds(candidates, rounds, goes_on):
        rate = yield settings
        rates[settings] = [] if rate is None else [*rates[settings], rate]
    return rates


def _fastest(present: Settings, rates: dict[Settings, list[float]]) -> Settings:
    """Return the fastest of those that are clearly faster than the present ones, or these."""

    def gain(settings: Settings) -> float:
        ratios = _ratios(rates[present], rates[settings])
        against = sum(ratio <= 1 for ratio in ratios)
        if len(ratios) < len(rates[present]) or not ratios or against > _AT_MOST_AGAINST * len(ratios):
            return 0.0
        return statistics.median(ratios)

    best = max(rates, key=gain)
    return best if gain(best) >= WORTH else present


def _ratios(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """In each round in which both had a turn."""
    return [ours / others for others, ours in zip(before, after, strict=False)]


def _ladders(start: Settings, gradients_mib: float) -> Iterator[tuple[str, Sequence[object]]]:
    """By knob the values worth trying instead of the present one: what is larger than all gradients is the same."""

    def steps(ladder: Sequence[float], present: float) -> list[float]:
        useful = [value for place, value in enumerate(ladder) if place == 0 or ladder[place - 1] < gradients_mib]
        return [value for value in useful if min(value, gradients_mib) != min(present, gradients_mib)]

    yield BUCKET_MIB.name, steps(_BUCKETS_MIB, start.bucket_mib)
    cycle_ms = start.cycle_time_ms
    yield CYCLE_TIME_MS.name, [value for value in _CYCLES_MS if value != (1 if cycle_ms is None else cycle_ms)]
    started_with = _LEAST_BUFFER_MIB if gradients_mib <= _LEAST_BUFFER_MIB else 0  # or more, which is not known here
    yield FUSION_THRESHOLD_MIB.name, steps(_BUFFERS_MIB, start.fusion_threshold_mib or started_with)
    yield COMPRESSION.name, [value for value in COMPRESSION.choices if value != start.compression]
