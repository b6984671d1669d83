from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpumem_nb import memory
from gpumem_nb.shared.categories import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from gpumem_nb.shared.errors import InvalidInput

KIB = 2**10


def test_a_loop_of_ones_own_is_reported_like_a_training_step() -> None:
    with memory.track() as report:
        assert "not ended" in str(report)
        net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(2):
            net(torch.randn(2048, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = sum(param.nbytes for param in net.parameters())
    assert report.ledger is not None
    assert sum(report.ledger.at_peak.values()) == report.peak == report.ledger.peak_bytes
    assert report.ledger.at_peak[PARAMETERS] == report.ledger.at_rest[PARAMETERS] == weights
    assert 2 * weights < report.ledger.at_rest[OPTIMIZER_STATE] < 2 * weights + KIB
    assert report.ledger.at_peak[ACTIVATIONS] >= 2048 * 512 * 4
    assert not report.left
    assert report.after - report.before >= 3 * weights
    assert "activations" in str(report)


def test_what_a_cell_leaves_behind_is_named(module: Any) -> None:
    module.kept = []
    with memory.track() as report:
        module.kept.append(torch.zeros(64 * KIB, dtype=torch.uint8))
        torch.zeros(2**20, dtype=torch.uint8)
    assert report.after - report.before == 64 * KIB
    (left,) = report.left
    assert (left.nbytes, left.dtype, left.shape) == (64 * KIB, "uint8", (64 * KIB,))
    assert "test_tracking.py" in left.made_at
    assert "somebodys.kept[0]" in left.holder
    assert report.peak == report.before + 64 * KIB + 2**20


def test_of_what_a_graph_keeps_the_tensor_is_named_that_has_the_graph(module: Any) -> None:
    module.losses = []
    net, inputs = nn.Linear(64, 64), torch.randn(256, 64)
    with memory.track() as report:
        module.losses.append(net(inputs).tanh().mean())
    largest = report.left[0]
    assert largest.nbytes == 64 * KIB
    assert "somebodys.losses[0]`" in largest.holder
    assert largest.holder.endswith("whose graph saved it for backward")


def test_code_that_fails_is_reported_too() -> None:
    with pytest.raises(ZeroDivisionError), memory.track() as report:  # noqa: PT012
        held = torch.zeros(2**20, dtype=torch.uint8)
        del held
        1 / 0  # noqa: B018
    assert report.peak == report.before + 2**20


def test_gradients_are_told_from_other_tensors() -> None:
    net = nn.Linear(1024, 1024, bias=False)
    optimizer = torch.optim.SGD(net.parameters())
    with memory.track() as report:
        net(torch.randn(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert report.ledger is not None
    assert report.ledger.at_peak[GRADIENTS] == 4 * 2**20


def test_one_inside_another_is_refused() -> None:
    with memory.track(), pytest.raises(InvalidInput, match="inside another"), memory.track():
        pass
    with memory.track() as report:
        pass
    assert report.after == report.before


def test_lazy_layers_and_sparse_tensors_do_not_stop_the_report() -> None:
    lazy, net = nn.LazyLinear(3), nn.Linear(4, 2)
    with memory.track() as report:
        out = torch.sparse.mm(torch.eye(4).to_sparse(), net(torch.ones(4, 4)))
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert tuple(out.shape) in [left.shape for left in report.left]
