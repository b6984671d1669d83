"""Forecasts of a step under other settings: recorded small, continued to any batch size, and replayed.

A step of a model asks for the same tensors whatever the batch size is, each with a number of elements that is affine in
it, or one for each pair of samples. So each allocation's bytes are continued, and not their sum: the peak of a larger
batch may lie elsewhere in the step, where a line through two peaks would miss it by up to 9 % (docs/prediction.md).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..shared.allocator_settings import AllocatorSettings
from ..shared.categories import (
    ACTIVATIONS,
    CATEGORIES,
    COMMUNICATION,
    INPUTS,
    INSIDE_OPERATORS,
    LOGITS,
    OPTIMIZER_STATE,
    OTHER,
    TEMPORARIES,
)
from ..shared.forecast import BY_OPERATORS, BY_PEAKS, BY_PEAKS_AT_MOST, RECORDED, SCALED, VARYING, Forecast
from .growth import Blocks, of_a_block
from .ledger.trace import CODE, Ints, Trace
from .virtual_gpu.gpu import replay

WHOLE = 1e-6  # by how much less than this a number of samples is whole


class SmallSteps:
    """Recorded steps that differ in nothing but the batch size, ready to be continued.

    Attributes:
        traces: those steps, once the optimizer has its state; two of them make an allocation of one for each of the
            other, unless ``how`` is ``BY_PEAKS``.
        how: larger steps follow from them.
        varies: whether samples are of different sizes, such as texts padded to the longest: the next are others.

    Args:
        traces: one or two, of different batch sizes.
        varies: as far as is known from the data; inputs that lie on no line tell it too.
    """

    def __init__(self, traces: Sequence[Trace], varies: bool = False) -> None:
        self._first, self.how, self.varies = list(traces), RECORDED, varies
        if len(traces) > 1:
            *self._first, self.how = _paired(*traces)
        self.traces = [trace.settled() for trace in self._first]
        if len(traces) > 1:
            self.varies = varies or (self.how != BY_PEAKS and _vary(*self.traces))

    def recorded_at(self, batch_size: int) -> Trace | None:
        """Return the step of that very size, if it is one of these."""
        return next((trace for trace in self.traces if trace.batch_size == batch_size), None)

    def first(self, trace: Trace) -> Trace:
        """Return one of these steps, or one that was continued, as the first: its update makes the optimizer's state.

        That comes to lie among the cached segments that forward and backward have left, where there was none before.
        """
        alike = next((at for at, one in enumerate(self.traces) if one is trace), -1)
        of = self._first[alike]
        return replace(trace, before=of.before, event=of.event, phase=of.phase, module=of.module)

    def _of_pairs(self, first: Ints, second: Ints) -> NDArray[np.bool_]:
        """Return which sizes are those of pairs of samples: they grow for each sample.

        So do those of all samples but some whole number of them, which still lie on a line.
        """
        small, large = (trace.batch_size for trace in self.traces)
        slope = (second - first) / (large - small)
        grows = second * small > first * large
        without = small - np.divide(first, slope, out=np.zeros(len(first)), where=grows)
        of_pairs: NDArray[np.bool_] = grows & (np.abs(without - np.rint(without)) > WHOLE)
        return of_pairs

    def on_host(self, batch_size: int) -> int:
        """Return the bytes that wait in host memory at another batch size, on the line through what they came to."""
        small, large = self.traces[0], self.traces[-1]
        if batch_size == large.batch_size or large is small:
            return large.host_bytes
        each = (large.host_bytes - small.host_bytes) / (large.batch_size - small.batch_size)
        if self.varies:
            state = large.host_state_bytes
            of_samples = ((one.host_bytes - one.host_state_bytes) / one.batch_size for one in (small, large))
            return state + round(max(of_samples) * batch_size)
        return max(0, round(large.host_bytes + (batch_size - large.batch_size) * each))

    def continued(self, batch_size: int) -> Trace:
        """Return the step at another batch size, in the order of the larger one."""
        small, large = self.traces
        share = (batch_size - small.batch_size) / (large.batch_size - small.batch_size)

        def line(first: Ints, second: Ints, square: NDArray[np.bool_]) -> Ints:
            each, of_large = first / small.batch_size, second / large.batch_size  # for a sample
            if self.varies:  # which samples will come is not known: take the larger of both for each
                values = np.where(first == second, first, np.maximum(each, of_large) * batch_size)
            else:
                values = np.where(
                    square, (each + (of_large - each) * share) * batch_size, first + (second - first) * share
                )
            whole: Ints = np.rint(np.maximum(0, values)).astype(np.int64)
            return whole

        missing = line(np.array([small.missing_bytes]), np.array([large.missing_bytes]), np.array([False]))
        first, second = small.size[small.births], large.size[large.births]
        pairs = large.lasting[large.births] & self._of_pairs(first, second)
        size = large.size.copy()  # what was there before does not depend on the step
        size[large.births] = line(first, second, pairs)
        return replace(
            large,
            batch_size=batch_size,
            size=size,
            foreign_bytes=max(small.foreign_bytes, large.foreign_bytes),
            rest_bytes=max(small.rest_bytes, large.rest_bytes),
            missing_bytes=int(missing[0]),
        )


def _paired(small: Trace, large: Trace) -> tuple[Trace, Trace, str]:
    """Return the two steps allocation by allocation as far as that can be, and how larger ones follow from them."""
    settled = small.settled(), large.settled()
    if _alike(*settled):
        return small, large, SCALED
    small = replace(small, call=_numbered_as(settled[1], settled[0]).call)
    calls = int(max(small.call.max(initial=0), large.call.max(initial=0)))
    differs = small.scratch_in_calls(calls) != large.scratch_in_calls(calls)
    first, second = small.without_scratch(differs), large.without_scratch(differs)
    if _alike(first.settled(), second.settled()):
        return first, second, BY_OPERATORS
    return small, large, BY_PEAKS


def _numbered_as(large: Trace, small: Trace) -> Trace:
    """Return the smaller step with its operator calls numbered as those of the larger one.

    Samples are put together one by one, which takes calls for each; after that calls are the same ones. What lasts
    longer than its call is the same in both and says by how much their numbers differ from there on.
    """
    ours, theirs = small.call[small.lasting], large.call[large.lasting]
    if len(ours) != len(theirs):
        return small
    order = np.argsort(ours, kind="stable")
    ours, theirs = ours[order], theirs[order]
    anchor = np.maximum(0, np.searchsorted(ours, small.call, side="right") - 1)
    shift = (theirs - ours)[anchor] if len(ours) else 0
    return replace(small, call=np.where(small.call > 0, np.maximum(0, small.call + shift), 0))


def _alike(small: Trace, large: Trace) -> bool:
    """Return whether both make the same allocations; what other threads let go of meanwhile may differ."""
    return np.array_equal(small.call[small.births] > 0, large.call[large.births] > 0)


def _vary(small: Trace, large: Trace) -> bool:
    """Return whether bytes of inputs lie on no line."""
    inputs = small.category[small.births] == CODE[INPUTS]
    first, second = small.size[small.births][inputs], large.size[large.births][inputs]
    of_samples = first != second
    return not np.array_equal(first[of_samples] * large.batch_size, second[of_samples] * small.batch_size)


_NEAR = 0.8  # of the limit: below it there is room for any layout
_RECUT = (0.5, 0.8)  # times as many samples, in the step that has cut the cache before
_OF_SAMPLES = (ACTIVATIONS, LOGITS, INPUTS, INSIDE_OPERATORS, TEMPORARIES)
STEPS = 3  # replayed one after another: the second finds the segments of the first, and the third changes little


def forecast(
    steps: SmallSteps,
    batch_size: int,
    limit_bytes: int | None,
    allocator: AllocatorSettings | None = None,
    allowed_bytes: int | None = None,
    *,
    blocks: Blocks | None = None,
) -> Forecast:
    """Return what a step needs at this batch size.

    Args:
        steps: one recorded at it, or two at smaller ones.
        batch_size: samples of a micro-batch.
        limit_bytes: what may be reserved; ``None`` for no limit.
        allocator: how the caching allocator is set; ``None`` for as it is.
        allowed_bytes: of which it collects garbage above a share, which is no less where other processes have taken a
            part of the device; 0 for never, ``None`` for the limit.
        blocks: of the model, if it is asked what one more would take.
    """
    recorded = steps.recorded_at(batch_size)
    if recorded is None and steps.how == BY_PEAKS:
        found = _by_peaks(steps, batch_size, limit_bytes, allocator, allowed_bytes)
    else:
        how, trace = (steps.how, steps.continued(batch_size)) if recorded is None else (RECORDED, recorded)
        found = _of(trace, limit_bytes, how, allocator, allowed_bytes, steps.first(trace))
        found = replace(found, block_bytes=of_a_block(trace, blocks)) if blocks else found
    may_wait = steps.traces[-1].host_limit_bytes
    found = replace(found, host_bytes=steps.on_host(batch_size), host_limit_bytes=may_wait)
    return replace(found, how=VARYING) if steps.varies else found


def from_the_start(first: Trace, limit_bytes: int | None, how: str) -> Forecast:
    """Return what steps need in a process that begins with this one.

    Its optimizer makes its state among the cached segments that forward and backward have left, and the steps after it
    find fewer of those: that decides which segments the largest tensors get.

    Args:
        first: the first step that was ever taken, not settled.
        limit_bytes: what may be reserved; ``None`` for no limit.
        how: the trace was found.
    """
    return _of(first.settled((OPTIMIZER_STATE, OTHER)), limit_bytes, how, None, None, first, recut=False)


def largest(
    steps: SmallSteps, limit_bytes: int | None, most: int, allowed_bytes: int | None = None, certain: bool = True
) -> int:
    """Return the largest batch size up to ``most`` that fits with what a forecast may be wrong by; 0 if none does.

    Of a single step that is its own size or none. ``allowed_bytes`` as in :func:`forecast`. Unless ``certain``, without
    the error, and with cached segments given back.
    """
    if limit_bytes is None and not steps.traces[-1].host_bytes:
        return most

    def fits(batch_size: int) -> bool:
        one = forecast(steps, batch_size, limit_bytes, None, allowed_bytes)
        if limit_bytes is None or one.host_is_short:
            return not one.host_is_short
        return (one.high_bytes <= limit_bytes and one.fits_recut) if certain else one.fits

    if len(steps.traces) == 1:
        return steps.traces[0].batch_size * fits(steps.traces[0].batch_size)
    return bisect.bisect_left(range(1, most + 1), True, key=lambda batch_size: not fits(batch_size))


def _of(
    trace: Trace,
    limit_bytes: int | None,
    how: str,
    allocator: AllocatorSettings | None,
    allowed_bytes: int | None,
    first: Trace,
    recut: bool = True,
) -> Forecast:
    at_peak, phase, module = _peak(trace)
    allocator = trace.allocator if allocator is None else allocator
    allowed = limit_bytes if allowed_bytes is None else allowed_bytes
    # Segments of their own and a growing one are cut differently.
    laid_out = allocator.expandable_segments == trace.allocator.expandable_segments
    events, layout = _replayable(trace, first, laid_out)
    held = layout[layout[:, 1] > 0, 0]
    without_limit = replay(events, None, allocator, layout, allowed)
    rounded = allocator.roundup_power2_divisions != trace.allocator.roundup_power2_divisions
    more = allocator.rounded(held) - int(held.sum()) if rounded else 0  # for what is held, where its size is not enough
    reserved = without_limit.reserved_peak_bytes + more
    fits = limit_bytes is None or reserved <= limit_bytes
    if limit_bytes and limit_bytes > more and not fits:
        fits = replay(events, limit_bytes - more, allocator, layout, allowed).within_limit
    live = sum(at_peak.values())
    found = Forecast(live, max(reserved, live), fits, at_peak, phase, module, how)
    near = limit_bytes is not None and _NEAR * limit_bytes < found.high_bytes <= limit_bytes
    if limit_bytes is None or not near or not recut:
        return found
    room = limit_bytes - more - found.error_bytes

    def fits_after(share: float) -> bool:
        cut, _ = _replayable(trace, _of_other_size(trace, share), laid_out)
        return replay(cut, room, allocator, layout, allowed).within_limit

    return replace(found, fits_recut=all(map(fits_after, _RECUT)))


def _peak(trace: Trace, phase: str = "") -> tuple[dict[str, int], str, str]:
    """Return live bytes by category at the peak of a step, or of one phase in it, and what runs then."""
    base = np.bincount(trace.category[trace.before], trace.size[trace.before], len(CATEGORIES)).astype(np.int64)
    base[CODE[COMMUNICATION]] += trace.foreign_bytes
    base[CODE[OTHER]] += trace.rest_bytes
    live = _live(trace)
    if phase:
        live[1:][trace.phase != trace.phases.index(phase)] = live[0] = live.min() - 1
    peak, change = int(live.argmax()), trace.change
    place = np.abs(trace.event[:peak]) - 1
    at_peak = base + np.bincount(trace.category[place], change[:peak], len(CATEGORIES)).astype(np.int64)
    at_peak[CODE[INSIDE_OPERATORS]] += trace.missing_bytes
    found = {category: int(size) for category, size in zip(CATEGORIES, at_peak, strict=True) if size}
    if not len(trace.event):
        return found, "", ""
    at = max(0, peak - 1)
    return found, trace.phases[trace.phase[at]], trace.modules[trace.module[at]]


def _of_other_size(trace: Trace, share: float) -> Trace:
    """Return the same step of so many times as many samples, roughly: what forward makes grows with them."""
    of_samples = trace.births & np.isin(trace.category, [CODE[category] for category in _OF_SAMPLES])
    return replace(trace, size=np.where(of_samples, np.maximum(1, (trace.size * share).astype(np.int64)), trace.size))


def _by_peaks(
    steps: SmallSteps,
    batch_size: int,
    limit_bytes: int | None,
    allocator: AllocatorSettings | None,
    allowed_bytes: int | None,
) -> Forecast:
    """Return a straight line through the two peaks of each phase, for steps that do not ask for the same tensors.

    That of the phase which comes out highest counts: in small steps the update's may hide how those before it grow.
    Segments come in pieces of 20 MiB, so a line through what two small steps reserve would say little. Nor do these
    tell what of their cache would be collected as garbage near the limit: that is said.
    """
    traces = steps.traces
    of_large = _of(traces[1], None, BY_PEAKS, allocator, None, steps.first(traces[1]))
    longer = (batch_size - traces[1].batch_size) / (traces[1].batch_size - traces[0].batch_size)
    small, large = ({phase: _peak(one, phase) for phase in _phases(one)} for one in traces)
    lines = [(_line(small.get(name, found)[0], found[0], longer), *found[1:]) for name, found in large.items()]
    at_peak, phase, module = max(lines, key=lambda line: sum(line[0].values()))
    live = sum(at_peak.values())
    reserved = live + of_large.reserved_peak_bytes - of_large.live_peak_bytes
    fits = limit_bytes is None or reserved <= limit_bytes
    allocator = traces[1].allocator if allocator is None else allocator
    allowed = limit_bytes if allowed_bytes is None else allowed_bytes
    how = BY_PEAKS_AT_MOST if allocator.garbage_collection_threshold and allowed else BY_PEAKS
    return Forecast(live, reserved, fits, at_peak, phase, module, how)


def _phases(trace: Trace) -> list[str]:
    """Return those in which anything was asked for or released; of a step without any such event the whole."""
    return [trace.phases[number] for number in sorted(set(trace.phase.tolist()))] or [""]


def _line(small: dict[str, int], large: dict[str, int], steps: float) -> dict[str, int]:
    """Return live bytes by category so many steps behind the larger one of two, each as long as that between them."""
    grown = max(0, sum(large.values()) - sum(small.values()))
    more = {category: max(0, size - small.get(category, 0)) for category, size in large.items()}
    return {
        category: max(0, round(size + grown * steps * more[category] / (sum(more.values()) or 1)))
        for category, size in large.items()
    }


def _live(trace: Trace) -> Ints:
    """Return by how much more is live before each event of a step, and after the last, than before the step."""
    return np.concatenate([[0], np.cumsum(trace.change)])


def _replayable(trace: Trace, first: Trace, laid_out: bool) -> tuple[list[int], Ints]:
    """Return the trace to replay: the state before, then the step several times, the ``first`` time another one.

    What a step leaves is released when the next one begins, and what it took away is there again. What operators took
    inside without being seen has to be found room for where most is live. Both traces are of the same allocations. If
    ``laid_out``, what was there lies where it lay, else as if it came one after another.
    """
    held = trace.layout[trace.layout[:, 1] > 0]
    held = held[np.argsort(held[:, 1])]  # the oldest first
    number_of = {int(allocation): number for number, allocation in enumerate(held[:, 1], start=1)}
    places = np.flatnonzero(trace.before & (trace.size > 0)).tolist()
    numbers = {place: number_of[number] for place in places if (number := int(trace.number[place])) in number_of}
    if len(held):
        events = [] if laid_out else held[:, 0].tolist()
        foreign = [trace.foreign_bytes - trace.held_foreign_bytes]
    else:
        events, foreign = [], [trace.rest_bytes, trace.foreign_bytes]
    events += [int(size) for size in foreign if size > 0]
    made = len(held) + sum(size > 0 for size in foreign)
    for step in (first, *(trace for _ in range(STEPS - 1))):
        for place in np.flatnonzero(step.before & (step.size > 0)).tolist():
            if place not in numbers:
                made += 1
                numbers[place] = made
                events.append(int(step.size[place]))
        highest = int(_live(step).argmax()) if step.missing_bytes else -1
        for at, event in enumerate(step.event.tolist()):
            if at == highest:
                made += 1
                events += [step.missing_bytes, -made]
            place = abs(event) - 1
            if event > 0 and step.size[place]:
                made += 1
                numbers[place] = made
                events.append(int(step.size[place]))
            elif event < 0 and place in numbers:
                events.append(-numbers.pop(place))
        for place in [place for place in numbers if not trace.before[place]]:
            events.append(-numbers.pop(place))
    layout = trace.layout[: len(trace.layout) * laid_out].copy()
    in_use = layout[:, 1] > 0
    layout[in_use, 1] = [number_of[number] for number in layout[in_use, 1].tolist()]
    return events, layout
