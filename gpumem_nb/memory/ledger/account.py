"""The ledger of one step: to whom each allocation belonged, from when to when."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...shared.categories import (
    ACTIVATIONS,
    CASTS,
    CATEGORIES,
    COMMUNICATION,
    GRADIENTS,
    INPUTS,
    INSIDE_OPERATORS,
    LOGITS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
)
from ...shared.messages import Ledger, Span, Timeline
from ...shared.step_times import REDUCTION
from .events import Base, Events
from .trace import CODE, Trace

MOST_MODULES = 40  # in a ledger; the rest is summed up
MOST_POINTS = 600  # in a timeline
REST = "…"
# Whom an allocation belongs to when several claim it: the first one.
_CLAIMS = (PARAMETERS, OPTIMIZER_STATE, GRADIENTS, COMMUNICATION, INPUTS, CASTS, LOGITS, ACTIVATIONS)
_PRECEDENCE = {category: place for place, category in enumerate(_CLAIMS)}
_LASTING = (PARAMETERS, OPTIMIZER_STATE, GRADIENTS, COMMUNICATION, INPUTS)
_Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that an allocation is of a category, made for a module."""

    category: str
    module: str
    nbytes: int

    def yields_to(self, category: str) -> bool:
        """Return whether a claim of this category counts more."""
        return _PRECEDENCE[category] < _PRECEDENCE[self.category]


@dataclass(frozen=True, slots=True)
class Mark:
    """From this moment, on the clock of ``time.perf_counter_ns``, a part of the step runs, in a module."""

    time_ns: int
    phase: str
    module: str


@dataclass(frozen=True, slots=True)
class Observed:
    """The observations of one step.

    Attributes:
        began_ns, ended_ns: on the clock of ``time.perf_counter_ns``.
        base: what was alive when it began.
        claims: by the number of the allocation.
        live_peak_bytes: the allocator's highest live bytes.
        virtual: whether it was a virtual GPU's.
        exact: whether every allocation was seen.
        host_state_bytes: of the optimizer's state what waits in host memory after an update that is foreseen.
    """

    began_ns: int
    ended_ns: int
    base: Base
    events: Events
    claims: dict[int, Claim]
    marks: list[Mark]
    live_peak_bytes: int
    virtual: bool
    exact: bool
    host_state_bytes: int = 0


class Account:
    """The account of one step: live bytes by category after each event, and who owned what at the peak."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._events = events = observed.events
        self._claims = observed.claims | {
            number: Claim(ACTIVATIONS, module, 0)
            for number, module in self._kept_for_backward()
            if number not in observed.claims
        }
        self._numbers, self._which = np.unique(events.allocation, return_inverse=True)
        self._categories = self._categorise()
        # One row a category, one column before the first event and after each.
        self._live = np.zeros((len(CATEGORIES), len(events.bytes) + 1), dtype=np.int64)
        self._live[self._categories[self._which], np.arange(1, len(events.bytes) + 1)] = events.bytes
        self._live[:, 0] = self._base()
        np.cumsum(self._live, axis=1, out=self._live)
        self._peak = int(self._live.sum(axis=0).argmax())

    def ledger(self) -> Ledger:
        """Return where the bytes were at the peak, and in the end.

        Where only tensors were seen, the rest of what was asked for is inside operators. What the allocator counts
        beyond that, by rounding up, is in no category.
        """
        observed, at_peak = self._observed, self._by_category(self._live[:, self._peak])
        missing = self._events.live_peak_bytes - sum(at_peak.values())
        if missing > 0 and not observed.exact:
            at_peak[INSIDE_OPERATORS] = at_peak.get(INSIDE_OPERATORS, 0) + missing
        mark = self._mark_at(self._time_ns(self._peak))
        return Ledger(
            peak_bytes=max(observed.live_peak_bytes, sum(at_peak.values())),
            phase=mark.phase,
            module=mark.module,
            at_peak=at_peak,
            at_rest=self._by_category(self._live[:, -1]),
            modules=self._modules(),
            virtual=observed.virtual,
            exact=observed.exact,
            operators=self._operators(),
        )

    def _operators(self) -> int:
        """Up to the end of backward. Where calls are not told apart, what was allocated stands for them."""
        ends = (mark.time_ns for mark in self._observed.marks if mark.phase == REDUCTION)
        before = self._events.time_ns < next(ends, self._observed.ended_ns)
        calls = np.unique(self._events.call[before])
        return len(calls[calls > 0]) or int((self._events.bytes[before] > 0).sum())

    def timeline(self, rank: int, step: int, ledger: Ledger) -> Timeline:
        """Return the whole step; the bytes are thinned out so that every peak between two points stays."""
        total, began_ns = self._live.sum(axis=0), self._observed.began_ns
        shown = np.unique([0, *_highest(total, MOST_POINTS), self._peak, len(total) - 1])
        times = [(self._time_ns(index) - began_ns) / 1e6 for index in shown]
        live = {name: tuple(self._live[code, shown].tolist()) for name, code in CODE.items()}
        return Timeline(
            rank=rank,
            step=step,
            step_s=(self._observed.ended_ns - began_ns) / 1e9,
            time_ms=tuple(times),
            live_bytes={name: values for name, values in live.items() if any(values)},
            spans=tuple(self._spans()),
            ledger=ledger,
        )

    def trace(self, batch_size: int) -> Trace:
        """Return the step as the list of its allocations."""
        events, base = self._events, self._observed.base
        own = np.flatnonzero(~events.foreign)
        which, bytes_ = self._which[own], events.bytes[own]
        born, gone, call = self._lives()
        held = np.bincount(which, -np.minimum(bytes_, 0), len(self._numbers)).astype(np.int64)  # what is released
        size = np.maximum(held, np.bincount(which, np.maximum(bytes_, 0), len(self._numbers)).astype(np.int64))
        known = dict(self._from_before())
        there = set(self._numbers.tolist())
        others = [number for number in known if number not in there]
        sizes = np.concatenate([size, np.array([known[number].nbytes for number in others], dtype=np.int64)])
        codes = np.array([CODE[known[number].category] for number in others], dtype=np.int64)
        order = np.argsort(np.concatenate([self._numbers, np.array(others, dtype=np.int64)]), kind="stable")
        own_calls = np.concatenate([call[0], np.zeros(len(others), dtype=np.int64)])
        before = np.concatenate([~born, np.ones(len(others), dtype=np.bool_)])
        scratch = np.concatenate([(call[0] == call[1]) & (call[0] > 0) & born & gone, np.zeros(len(others), np.bool_)])
        foreign = np.isin(np.arange(len(sizes)), self._which[events.foreign])
        number = np.empty(len(order), dtype=np.int64)
        number[order] = np.arange(1, len(order) + 1)
        marks = self._observed.marks
        at = np.maximum(0, np.searchsorted([mark.time_ns for mark in marks], events.time_ns[own], side="right") - 1)
        phases = tuple(dict.fromkeys(mark.phase for mark in marks))
        modules = tuple(dict.fromkeys(mark.module for mark in marks))
        phase_of = np.array([phases.index(mark.phase) for mark in marks])
        module_of = np.array([modules.index(mark.module) for mark in marks])
        sizes[foreign] = 0
        highest = int(np.cumsum(np.append(0, events.bytes[events.foreign])).max())
        live = self._live[:, 0].sum() - base.foreign_bytes
        seen = int(self._live.sum(axis=0).max())
        return Trace(
            batch_size=batch_size,
            size=sizes[order],
            category=np.concatenate([self._categories, codes])[order],
            before=before[order],
            call=own_calls[order],
            scratch=scratch[order],
            event=np.sign(bytes_) * number[which],
            phase=phase_of[at],
            module=module_of[at],
            phases=phases,
            modules=modules,
            foreign_bytes=base.foreign_bytes + highest,
            rest_bytes=max(0, int(live - sizes[before & ~foreign].sum())),
            missing_bytes=0 if self._observed.exact else max(0, events.live_peak_bytes - seen),
            number=np.concatenate([self._numbers, np.array(others, dtype=np.int64)])[order],
            layout=base.layout,
            held_foreign_bytes=base.foreign_bytes,
            allocator=base.allocator,
            host_state_bytes=self._observed.host_state_bytes,
        )

    def _lives(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], _Array]:
        """Of each allocation: did it come, did it go, and in which operator calls."""
        events, count = self._events, len(self._numbers)
        born, gone = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
        born[self._which[events.bytes > 0]] = True
        gone[self._which[events.bytes < 0]] = True
        call = np.zeros((2, count), dtype=np.int64)
        call[(events.bytes < 0).astype(np.int64), self._which] = events.call
        return born, gone, call

    def _kept_for_backward(self) -> Iterator[tuple[int, str]]:
        """Yield what forward made and backward freed, with its module: kept, even if autograd's hooks did not see it.

        The inputs of ``torch.utils.checkpoint`` are such, and what an autograd function keeps as its own attribute.
        """
        events, marks = self._events, self._observed.marks
        at = np.searchsorted([mark.time_ns for mark in marks], events.time_ns, side="right") - 1
        forward = np.array([mark.phase == "forward" for mark in marks])[at]
        backward = np.array([mark.phase in ("backward", "recomputation") for mark in marks])[at]
        freed = set(events.allocation[backward & (events.bytes < 0)].tolist())
        for index in np.flatnonzero(forward & (events.bytes > 0) & ~events.foreign):
            if (number := int(events.allocation[index])) in freed:
                yield number, marks[at[index]].module

    def _categorise(self) -> _Array:
        """Return the code of the category of each allocation that came or went."""
        events = self._events
        born, gone, call = self._lives()
        foreign = np.zeros(len(self._numbers), dtype=np.bool_)
        foreign[self._which[events.foreign]] = True
        inside = (call[0] == call[1]) & (call[0] > 0)

        def category(index: int) -> str:
            number = int(self._numbers[index])
            claim = self._claims.get(number)
            if claim and (born[index] or claim.category in _LASTING):
                return claim.category
            if foreign[index]:
                return COMMUNICATION
            if not (born[index] and gone[index]):  # it was there before, or stays
                return OTHER
            return INSIDE_OPERATORS if inside[index] else TEMPORARIES

        return np.array([CODE[category(index)] for index in range(len(self._numbers))], dtype=np.int64)

    def _base(self) -> _Array:
        """Live bytes by category before the first event."""
        base = np.zeros(len(CATEGORIES), dtype=np.int64)
        for _, claim in self._from_before():
            base[CODE[claim.category]] += claim.nbytes
        base[CODE[COMMUNICATION]] += self._observed.base.foreign_bytes
        base[CODE[OTHER]] = self._observed.base.live_bytes - base.sum()
        return base

    def _from_before(self) -> Iterator[tuple[int, Claim]]:
        """Yield what was there before the first event and is known."""
        born = set(self._events.allocation[self._events.bytes > 0].tolist())
        for number, claim in self._claims.items():
            if number not in born and claim.category in _LASTING:
                yield number, claim

    def _modules(self) -> tuple[tuple[str, str, int], ...]:
        """Return who owned the bytes at the peak, largest first."""
        events, found = self._events, defaultdict[tuple[str, str], int](int)
        change = np.bincount(self._which[: self._peak], events.bytes[: self._peak], minlength=len(self._numbers))
        held = {int(number): int(bytes_) for number, bytes_ in zip(self._numbers, change, strict=True) if bytes_}
        for number, claim in self._from_before():
            held[number] = held.get(number, 0) + claim.nbytes
        for number, claim in self._claims.items():
            if held.get(number, 0) > 0:
                found[claim.module, claim.category] += held[number]
        for index, module in self._made_in():
            if size := held.get(int(self._numbers[index]), 0):
                found[module, CATEGORIES[self._categories[index]]] += size
        rows = sorted(((*key, size) for key, size in found.items()), key=lambda row: -row[2])
        rest = defaultdict[str, int](int)
        for _, category, size in rows[MOST_MODULES:]:
            rest[category] += size
        return (*rows[:MOST_MODULES], *((REST, category, size) for category, size in rest.items()))

    def _made_in(self) -> Iterator[tuple[int, str]]:
        """Yield which short-lived allocations forward and backward made, and in which module: these have no owner."""
        events, marks = self._events, self._observed.marks
        at = np.searchsorted([mark.time_ns for mark in marks], events.time_ns, side="right") - 1
        short = np.isin(self._categories, [CODE[TEMPORARIES], CODE[INSIDE_OPERATORS]])[self._which]
        computes = np.array([mark.phase in ("forward", "backward", "recomputation") for mark in marks])[at]
        for place in np.flatnonzero(short & computes & (events.bytes > 0)):
            yield int(self._which[place]), marks[at[place]].module

    def _by_category(self, values: _Array) -> dict[str, int]:
        return {category: int(value) for category, value in zip(CATEGORIES, values, strict=True) if value}

    def _time_ns(self, index: int) -> int:
        return int(self._events.time_ns[index - 1]) if index else self._observed.began_ns

    def _mark_at(self, time_ns: int) -> Mark:
        marks = self._observed.marks
        return marks[max(0, bisect.bisect_right(marks, time_ns, key=lambda mark: mark.time_ns) - 1)]

    def _spans(self) -> Iterator[Span]:
        marks, began_ns = self._observed.marks, self._observed.began_ns
        ends = [mark.time_ns for mark in marks[1:]] + [self._observed.ended_ns]
        for mark, end_ns in zip(marks, ends, strict=True):
            yield Span((mark.time_ns - began_ns) / 1e6, (end_ns - began_ns) / 1e6, mark.phase, mark.module)


def _highest(values: _Array, most: int) -> list[int]:
    """Return the index of the highest value in each of at most so many stretches of equal length."""
    stretches = np.array_split(np.arange(len(values)), min(most, len(values)))
    return [int(stretch[values[stretch].argmax()]) for stretch in stretches]
