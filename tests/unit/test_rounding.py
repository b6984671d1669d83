"""Stochastic rounding of updates: unbiased, the same wherever it is drawn, and the optimizer's state as in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from gpumem_nb.engine.step import pieces
from gpumem_nb.engine.step.pieces import Pieces, round_into
from tests.unit.test_shards import KINDS


def test_each_number_becomes_one_of_its_neighbours_and_is_right_on_average() -> None:
    wide = torch.tensor([1.0 + 2**-9, -1.0 - 2**-10, 3.14159, 1e-39, 0.0, -2.0]).repeat(50_000, 1)
    weight = torch.empty_like(wide, dtype=torch.bfloat16)
    before = torch.get_rng_state()
    round_into(weight, wide.clone(), "any")
    assert torch.equal(before, torch.get_rng_state())
    for column, exact in enumerate(wide[0].double()):
        found = weight[:, column].double()
        step = (found.max() - found.min()).item()
        assert found.min() <= exact <= found.max()
        assert len(found.unique()) == (1 if exact in (0.0, -2.0) else 2)
        assert abs(found.mean() - exact).item() <= 5 * step / 50_000**0.5
    again = torch.empty_like(weight)
    round_into(again, wide.clone(), "any")
    assert torch.equal(weight, again)
    round_into(again, wide.clone(), "other")
    assert not torch.equal(weight, again)


def test_what_is_not_a_number_stays_so() -> None:
    odd = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    weight = torch.empty(odd.shape, dtype=torch.bfloat16)
    for seed in range(20):
        round_into(weight, odd.clone(), str(seed))
        assert weight[:3].isnan().all()
        assert weight[3:].tolist() == [float("inf"), -float("inf")]


def test_updates_that_rounding_to_nearest_loses_arrive_on_average() -> None:
    weight = nn.Parameter(torch.ones(200, 200, dtype=torch.bfloat16))
    nearest = weight.detach().clone()
    optimizer = SGD([weight], lr=1.0)
    for step in range(50):
        weight.grad = torch.full_like(weight, 2.0**-12)
        nearest -= weight.grad
        Pieces(frozenset({0}), 1, step).update(optimizer, optimizer.step)
    assert torch.equal(nearest, torch.ones_like(nearest))
    assert weight.float().mean().item() == pytest.approx(1 - 50 * 2**-12, abs=2e-4)


@pytest.mark.parametrize(("kind", "options"), [*KINDS, (AdamW, {"fused": True})])
@pytest.mark.parametrize("cut", [False, True])
def test_the_state_is_that_of_fp32_weights_whole_or_in_slices(
    monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any], cut: bool
) -> None:
    monkeypatch.setattr(pieces, "_LEAST_ELEMENTS", 64 if cut else 2**18)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((40, 50), (7,), (3, 4), (2, 5, 3, 3))]
    params[3].data = params[3].data.contiguous(memory_format=torch.channels_last)
    others = [nn.Parameter(param.detach().clone()) for param in params]
    ours, plain = (kind(some, lr=1e-2, **options) for some in (params, others))
    places = frozenset(place for place, param in enumerate(params) if param.dim() > 1)
    for place in places:
        params[place].data = params[place].data.bfloat16()
    for step in range(3):
        for param, other in zip(params, others, strict=True):
            other.data.copy_(param.data)
            other.grad = torch.empty_like(other).copy_(torch.randn(other.shape)).bfloat16().float()
            param.grad = other.grad.to(param.dtype)
        gradients = [param.grad for param in params]
        Pieces(places, 1, step).update(ours, ours.step)
        plain.step()
        assert all(param.grad is gradient for param, gradient in zip(params, gradients, strict=True))
        for param, other in zip(params, others, strict=True):
            digit = other.detach().abs().clamp(min=1e-30) * 2**-7
            assert ((param.detach().float() - other.detach()).abs() <= digit).all()
            assert ours.state[param].keys() == plain.state[other].keys()
            for name, value in plain.state[other].items():
                found = ours.state[param][name]
                assert found.dtype == value.dtype
                assert found.stride() == value.stride()
                # Vector instructions of fused kernels end elsewhere in a slice.
                assert torch.equal(found, value) or (cut and torch.allclose(found, value, rtol=1e-5))
    assert len(ours.state) == len(plain.state)
