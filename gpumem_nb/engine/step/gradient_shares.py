"""What a rank keeps of averaged gradients until the update: the knob ``shard_gradients`` (ZeRO stage 2).

Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.2: a rank that updates a share of each weight needs no more of the
averaged gradients. A bucket that has arrived is cut: the share is kept, and the memory of the rest is free for what
backward computes next. What needs whole gradients (clipping, the loss scaler, the noise scale) goes by their norms,
which are taken before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ...internals.torch_foreach_internals import norms_of, type_by_type
from ...memory.ledger.recorder import Recorder
from .buckets import Bucket, arrived
from .gradients import marks, square_of
from .partition import laid_as

Spans = Mapping[int, tuple[int, int]]
"""From where to where a rank keeps elements of weights' gradients, by the ids of the weights."""


class _Share(NamedTuple):
    row: Tensor  # this rank's elements, in the order in which those of the weight lie
    norm: Tensor  # of the whole averaged gradient


class GradientShares:
    """This rank's share of the averaged gradients of the step under way."""

    def __init__(self) -> None:
        self._spans: Spans = {}
        self._kept: dict[int, _Share] = {}

    def begin(self, spans: Spans) -> None:
        """A step begins, in which this is kept; without any, gradients stay whole."""
        self._spans = spans
        self._kept.clear()

    @property
    def wanted(self) -> bool:
        """Return whether gradients are cut in this step."""
        return bool(self._spans)

    def cut(self, bucket: Bucket) -> None:
        """Keep the share of a bucket whose gradients are averages by now, and let go of the rest."""
        whole = []
        for place, (param, wires) in enumerate(zip(bucket.params, bucket.wires, strict=True)):
            # Not a table of a sparse gradient, which the update refuses, nor what a cell has taken from the optimizer.
            if len(wires) == 1 and id(param) in self._spans:
                if param.grad is None:
                    param.grad = bucket.places.pop(id(param), None)
                arrived(param, wires)
                bucket.wires[place] = []
                whole.append((param, param.grad))
        del wires
        norms = norms_of([gradient for _, gradient in whole if gradient is not None])
        for norm in norms:
            param, gradient = whole.pop(0)
            assert gradient is not None
            begin, end = self._spans[id(param)]
            row = laid_as(gradient, param)[begin:end]
            with suppress(torch.OutOfMemoryError):  # ranks may have voted: then the rest stays beside it
                row = row.clone()
            self._kept[id(param)] = _Share(row, norm)
            if Recorder.current:
                Recorder.current.claim_gradients(param, [gradient, row])
            param.grad = None
        bucket.left_as = marks(bucket.params)

    def drop(self, absent: Collection[int]) -> None:
        """Let go of what no rank had a gradient of."""
        for weight in absent:
            self._kept.pop(weight, None)

    def of(self, params: Sequence[Tensor]) -> tuple[dict[int, Tensor] | None, list[Tensor]]:
        """Return what is kept of these weights' gradients, by place, and :meth:`norms`; ``None`` if they are whole."""
        if not self._spans:
            return None, []
        rows = {place: self._kept[id(param)].row for place, param in enumerate(params) if id(param) in self._kept}
        return rows, self.norms(params)

    def norms(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the norms of these weights' whole gradients, in the order in which clipping goes through them.

        Gradients without elements are not cut, and count: how numbers are added up depends on how many there are.
        """
        if not self._kept:
            return []
        of_empty = {
            id(param): torch.linalg.vector_norm(param.grad)
            for param in params
            if not param.numel() and param.grad is not None
        }
        there = [param for param in params if id(param) in self._kept or id(param) in of_empty]
        return [of_empty[id(one)] if id(one) in of_empty else self._kept[id(one)].norm for one in type_by_type(there)]

    def square(self, params: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of the averaged gradients of weights of one type and device, in fp32."""
        norms = self.norms(params)
        return torch.stack(norms).float().square().sum() if norms else square_of(params)

    def norm(self, param: Tensor) -> Tensor | None:
        """Return the norm of a weight's whole gradient, if it was cut."""
        return self._kept[id(param)].norm if id(param) in self._kept else None
