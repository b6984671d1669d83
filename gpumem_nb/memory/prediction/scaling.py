"""Two small steps continued to any batch size: the bytes of each allocation lie on a straight line.

A step of a model asks for the same tensors whatever the batch size is, each with a number of elements that is affine in
it. So each allocation's bytes are continued, and not their sum: the peak of a larger batch may lie elsewhere in the
step, where a line through two peaks would miss it by up to 9 % (docs/prediction.md).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..ledger.trace import Ints, Trace


class Unpaired(Exception):
    """Two steps did not ask for the same tensors."""


def paired(small: Trace, large: Trace) -> tuple[Trace, Trace, bool]:
    """The two steps with an allocation of one for each of the other, and whether operators' scratch was left whole.

    Raises:
        Unpaired: they differ even outside of operators.
    """
    if _alike(small, large):
        return small, large, True
    calls = int(max(small.call.max(initial=0), large.call.max(initial=0)))
    differs = small.scratch_in_calls(calls) != large.scratch_in_calls(calls)
    small, large = small.without_scratch(differs), large.without_scratch(differs)
    if _alike(small, large):
        return small, large, False
    raise Unpaired


def scaled(small: Trace, large: Trace, batch_size: int) -> Trace:
    """The step at another batch size, in the order of the ``large`` one; both must be :func:`paired`."""
    run = large.batch_size - small.batch_size
    share = (batch_size - large.batch_size) / run

    def line(first: Ints, second: Ints) -> Ints:
        values: Ints = np.maximum(0, np.rint(second + (second - first) * share)).astype(np.int64)
        return values

    rest, missing = (
        int(line(np.array([first]), np.array([second]))[0])
        for first, second in ((small.rest_bytes, large.rest_bytes), (small.missing_bytes, large.missing_bytes))
    )
    return replace(
        large,
        batch_size=batch_size,
        size=line(small.size, large.size),
        foreign_bytes=max(small.foreign_bytes, large.foreign_bytes),
        rest_bytes=rest,
        missing_bytes=missing,
    )


def _alike(small: Trace, large: Trace) -> bool:
    return (
        len(small.size) == len(large.size)
        and np.array_equal(small.before, large.before)
        and np.array_equal(small.call > 0, large.call > 0)
        and len(small.event) == len(large.event)
    )
