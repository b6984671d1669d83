"""Which rank updates which elements of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from gpumem_nb.engine.step.partition import ALIGNED, Partition, has_gaps
from gpumem_nb.engine.step.shards import why_not


def test_what_is_frozen_counts_for_nothing_and_no_vector_reaches_across_a_border() -> None:
    params = [torch.empty(size) for size in (70, 40_000, 7, 100_000, 3)]
    params[0].requires_grad_()
    params[3].requires_grad_()
    borders = Partition.of(params, 4, 0).borders
    assert [one[-1] for one in borders] == [param.numel() for param in params]
    sizes = [sum(one[rank + 1] - one[rank] for one in (borders[0], borders[3])) for rank in range(4)]
    assert all(size == pytest.approx(100_070 / 4, rel=0.01) for size in sizes)
    assert all(border % ALIGNED == 0 or border == one[-1] for one in borders for border in one)


def test_weights_with_gaps_are_refused_and_others_are_not() -> None:
    dense = torch.empty(4, 6, 8)
    assert not any(map(has_gaps, (dense, dense.transpose(0, 2), dense.permute(1, 2, 0), torch.empty(()), dense[:0])))
    assert all(map(has_gaps, (dense[:, :3], dense.expand(2, 4, 6, 8), dense[..., ::2])))
    assert "lie in memory without gaps" in why_not(SGD([nn.Parameter(torch.empty(4, 6)[:, :3])]))
