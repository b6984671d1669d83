"""Two small steps continued to any batch size: the bytes of each allocation lie on a straight line.

A step of a model asks for the same tensors whatever the batch size is, each with a number of elements that is affine in
it, or one for each pair of samples. So each allocation's bytes are continued, and not their sum: the peak of a larger
batch may lie elsewhere in the step, where a line through two peaks would miss it by up to 9 % (docs/prediction.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...shared.categories import INPUTS
from ...shared.forecast import BY_OPERATORS, BY_PEAKS, RECORDED, SCALED
from ..ledger.trace import CODE, Ints, Trace

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
        self.traces = [trace.settled() for trace in traces]
        self.how, self.varies = RECORDED, varies
        if len(self.traces) > 1:
            small, large, self.how = _paired(*self.traces)
            self.traces = [small, large]
            self.varies = varies or (self.how != BY_PEAKS and _vary(small, large))

    def recorded_at(self, batch_size: int) -> Trace | None:
        """Return the step of that very size, if it is one of these."""
        return next((trace for trace in self.traces if trace.batch_size == batch_size), None)

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
    if _alike(small, large):
        return small, large, SCALED
    small = _numbered_as(large, small)
    calls = int(max(small.call.max(initial=0), large.call.max(initial=0)))
    differs = small.scratch_in_calls(calls) != large.scratch_in_calls(calls)
    first, second = small.without_scratch(differs), large.without_scratch(differs)
    if _alike(first, second):
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
