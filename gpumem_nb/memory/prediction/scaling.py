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
from ...shared.forecast import BY_OPERATORS, BY_PEAKS, RECORDED, SCALED, VARYING
from ..ledger.trace import CODE, Ints, Trace


class SmallSteps:
    """Recorded steps that differ in nothing but the batch size, ready to be continued.

    Attributes:
        traces: those steps, once the optimizer has its state; two of them with an allocation of one for each of the
            other, unless ``how`` is ``BY_PEAKS``.
        how: larger steps follow from them.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.traces = [trace.settled() for trace in traces]
        self.how = RECORDED
        if len(self.traces) > 1:
            small, large, self.how = _paired(*self.traces)
            self.traces = [small, large]

    def recorded_at(self, batch_size: int) -> Trace | None:
        """The step of that very size, if it is one of these."""
        return next((trace for trace in self.traces if trace.batch_size == batch_size), None)

    def continued(self, batch_size: int) -> Trace:
        """The step at another batch size, in the order of the larger one."""
        small, large = self.traces
        share = (batch_size - small.batch_size) / (large.batch_size - small.batch_size)

        def line(first: Ints, second: Ints, square: NDArray[np.bool_]) -> Ints:
            each, of_large = first / small.batch_size, second / large.batch_size  # for a sample
            if self.how == VARYING:  # nobody knows which samples will come: what the larger of both took for each
                values = np.where(first == second, first, np.maximum(each, of_large) * batch_size)
            else:
                values = np.where(
                    square, (each + (of_large - each) * share) * batch_size, first + (second - first) * share
                )
            whole: Ints = np.rint(np.maximum(0, values)).astype(np.int64)
            return whole

        rest, missing = line(
            np.array([small.rest_bytes, small.missing_bytes]),
            np.array([large.rest_bytes, large.missing_bytes]),
            np.array([False, False]),
        ).tolist()
        # An affine number of elements does not grow for each sample: this is one of pairs of samples, say.
        pairs = large.lasting & (large.size * small.batch_size > small.size * large.batch_size)
        return replace(
            large,
            batch_size=batch_size,
            size=line(small.size, large.size, pairs),
            foreign_bytes=max(small.foreign_bytes, large.foreign_bytes),
            rest_bytes=rest,
            missing_bytes=missing,
        )


def _paired(small: Trace, large: Trace) -> tuple[Trace, Trace, str]:
    """The two steps allocation by allocation as far as that can be, and how larger ones follow from them."""
    if _alike(small, large):
        return small, large, VARYING if _vary(small, large) else SCALED
    small = _numbered_as(large, small)
    calls = int(max(small.call.max(initial=0), large.call.max(initial=0)))
    differs = small.scratch_in_calls(calls) != large.scratch_in_calls(calls)
    first, second = small.without_scratch(differs), large.without_scratch(differs)
    if _alike(first, second):
        return first, second, VARYING if _vary(first, second) else BY_OPERATORS
    return small, large, BY_PEAKS


def _numbered_as(large: Trace, small: Trace) -> Trace:
    """The smaller step with its operator calls numbered as those of the larger one.

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
    return replace(small, call=np.where(small.call > 0, small.call + shift, 0))


def _alike(small: Trace, large: Trace) -> bool:
    return (
        len(small.size) == len(large.size)
        and np.array_equal(small.before, large.before)
        and np.array_equal(small.call > 0, large.call > 0)
    )


def _vary(small: Trace, large: Trace) -> bool:
    """Whether samples are of different sizes, such as texts padded to the longest: then bytes lie on no line."""
    inputs = (small.category == CODE[INPUTS]) & ~small.before
    of_samples = inputs & (small.size != large.size)
    return not np.array_equal(small.size[of_samples] * large.batch_size, large.size[of_samples] * small.batch_size)
