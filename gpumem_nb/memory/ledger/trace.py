"""A step as the list of its allocations, apart from tensors and addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...shared.allocator_settings import AllocatorSettings
from ...shared.categories import CATEGORIES, OPTIMIZER_STATE

Ints = NDArray[np.int64]
CODE = {category: code for code, category in enumerate(CATEGORIES)}
"""A category as a number: its place in :data:`gpumem_nb.shared.categories.CATEGORIES`."""

_BEGINS = 4  # of a block that begins a segment: kBegins of virtual_gpu/caching_model.h


@dataclass(frozen=True, slots=True)
class Trace:
    """The allocations and releases of one step on the computing thread, and what was there before it.

    An allocation has one place in ``size``, ``category``, ``before``, ``call``, ``scratch`` and ``number``, in the
    order in which they came to be; an event has one place in ``event``, ``phase`` and ``module``.

    Attributes:
        batch_size: samples of a micro-batch.
        size: bytes of each allocation.
        category: of each, as its :data:`CODE`.
        before: whether it was there when the step began.
        call: the outermost operator call in which it was asked for; 0 outside of operators.
        scratch: whether it was asked for and released within one operator call.
        event: ``k`` for the allocation of number k, counted from 1, and ``-k`` for its release, in order of time.
        phase: the part of the step in which each event came, as an index in ``phases``.
        module: the module that ran, as an index in ``modules``.
        phases, modules: their names.
        foreign_bytes: the most that other threads (Horovod's) held.
        rest_bytes: what was there when the step began and is in no allocation that is known.
        missing_bytes: of the allocator's own peak, those that were not seen; 0 where all were.
        number: the allocator's own number of each allocation, by which ``layout`` names them.
        layout: where everything lay when the step began (:class:`.events.Base`), and ``held_foreign_bytes`` of it of
            other threads.
        allocator: how the caching allocator was set.
        host_bytes: what waited in host memory at most, of ``host_limit_bytes`` that may; ``host_state_bytes`` of it are
            the optimizer's state.
    """

    batch_size: int
    size: Ints
    category: Ints
    before: NDArray[np.bool_]
    call: Ints
    scratch: NDArray[np.bool_]
    event: Ints
    phase: Ints
    module: Ints
    phases: tuple[str, ...]
    modules: tuple[str, ...]
    foreign_bytes: int
    rest_bytes: int
    missing_bytes: int
    number: Ints
    layout: Ints
    held_foreign_bytes: int
    allocator: AllocatorSettings
    host_bytes: int = 0
    host_limit_bytes: int = 0
    host_state_bytes: int = 0

    @property
    def change(self) -> Ints:
        """Bytes by which each event changes what is live."""
        change: Ints = np.sign(self.event) * self.size[np.abs(self.event) - 1]
        return change

    def bytes_by_category(self) -> list[int]:
        """Of all allocations, those of the step and those before it, in the order of ``CATEGORIES``."""
        return [int(size) for size in np.bincount(self.category, self.size, len(CATEGORIES))]

    @property
    def births(self) -> NDArray[np.bool_]:
        """Return which allocations this step made; those of other threads have no size here."""
        made: NDArray[np.bool_] = ~self.before & (self.size > 0)
        return made

    @property
    def lasting(self) -> NDArray[np.bool_]:
        """Return the allocations that an operator call of this step left to others; all if calls are unknown."""
        found: NDArray[np.bool_] = self.births & ~self.scratch & ((self.call > 0) | ~self.call.any())
        return found

    def settled(self, lasting: Sequence[str] = (OPTIMIZER_STATE,)) -> Trace:
        """Return the same step once the optimizer has its state: what it makes of that and keeps was there before.

        An optimizer makes its state in its first update, after the peak of most steps; from then on it is there during
        forward and backward. Other ``lasting`` categories are treated alike. What takes the place of something that
        goes, as in an optimizer that computes its state anew, was not there before.
        """
        released = np.zeros(len(self.size), dtype=np.bool_)
        released[-self.event[self.event < 0] - 1] = True
        lasts = np.isin(self.category, [CODE[category] for category in lasting])
        new = lasts & ~self.before & ~released
        replaced = Counter(self.size[lasts & self.before & released].tolist())
        for place in np.flatnonzero(new) if replaced else ():
            new[place] = not replaced[size := int(self.size[place])]
            replaced[size] -= not new[place]
        kept = ~new[np.abs(self.event) - 1]
        return replace(
            self, before=self.before | new, event=self.event[kept], phase=self.phase[kept], module=self.module[kept]
        )

    def without_state(self) -> Trace:
        """Return the same where the optimizer's state, as far as it was there before, is no longer on the device."""
        gone = self.before & (self.category == CODE[OPTIMIZER_STATE])
        layout = self.layout.copy()
        layout[np.isin(layout[:, 1], self.number[gone]), 1] = 0
        return replace(self, size=np.where(gone, 0, self.size), layout=_joined(layout))

    def with_held(self, sizes: Sequence[int], category: str) -> Trace:
        """Return the same with allocations of so many bytes besides, which were there before."""
        none = np.zeros(len(sizes), dtype=np.int64)
        return replace(
            self,
            size=np.append(self.size, np.array(sizes, dtype=np.int64)),
            category=np.append(self.category, none + CODE[category]),
            before=np.append(self.before, none == 0),
            call=np.append(self.call, none),
            scratch=np.append(self.scratch, none > 0),
            number=np.append(self.number, none),
        )

    def scratch_in_calls(self, calls: int) -> Ints:
        """Return how many times each operator call asked for memory that it released itself, of so many calls."""
        return np.bincount(self.call[self.scratch], minlength=calls + 1)

    def without_scratch(self, of: NDArray[np.bool_]) -> Trace:
        """Return the same with one allocation for all that these operator calls need inside, as large as its peak.

        How often an operator asks for memory may depend on the batch size; how often operators are called does not.
        """
        place = np.abs(self.event) - 1
        inside = self.scratch[place] & of[self.call[place]]
        calls = self.call[place]
        size, keep = self.size.copy(), np.ones(len(self.event), dtype=np.bool_)
        collapsed = self.scratch & of[self.call]
        stays, change = ~collapsed, self.change
        for call in np.unique(calls[inside]):
            of_call = np.flatnonzero(inside & (calls == call))
            held = np.cumsum(change[of_call])
            highest = int(held.argmax())
            first = place[of_call[0]]  # stands for all of them, from the first one's birth to the last one's end
            size[first] = held[highest]
            stays[first] = True
            keep[of_call] = False
            keep[of_call[highest]] = True
        return self._of(size, stays, keep, collapsed)

    def _of(self, size: Ints, stays: NDArray[np.bool_], keep: NDArray[np.bool_], collapsed: NDArray[np.bool_]) -> Trace:
        """With these allocations and events only; what is collapsed comes and goes at its one event that is kept."""
        number = np.cumsum(stays)  # the new numbers of allocations
        place = np.abs(self.event) - 1
        first = {int(self.call[at]): at for at in np.flatnonzero(stays & collapsed)}
        event: list[int] = []
        phase: list[int] = []
        module: list[int] = []
        for at in np.flatnonzero(keep):
            allocation = place[at]
            if collapsed[allocation]:
                new = int(number[first[int(self.call[allocation])]])
                events = [new, -new]
            else:
                events = [int(np.sign(self.event[at]) * number[allocation])]
            event += events
            phase += [int(self.phase[at])] * len(events)
            module += [int(self.module[at])] * len(events)
        return replace(
            self,
            size=size[stays],
            category=self.category[stays],
            before=self.before[stays],
            call=self.call[stays],
            scratch=self.scratch[stays],
            number=self.number[stays],
            event=np.array(event, dtype=np.int64),
            phase=np.array(phase, dtype=np.int64),
            module=np.array(module, dtype=np.int64),
        )


def _joined(layout: Ints) -> Ints:
    """Return the same with one free block for several beside one another, as the caching allocator has it."""
    rows: list[list[int]] = []
    for nbytes, serves, kind in layout.tolist():
        if rows and serves == rows[-1][1] == 0 and not kind & _BEGINS:
            rows[-1][0] += nbytes
        else:
            rows.append([nbytes, serves, kind])
    return np.array(rows, dtype=np.int64).reshape(-1, 3)
