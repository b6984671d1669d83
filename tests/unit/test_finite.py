"""Gradients that are no numbers are found, and those that are only large are not taken for such."""

from __future__ import annotations

import math

import pytest
import torch

from gpumem_nb.engine.step.gradients import FiniteCheck
from gpumem_nb.engine.step.parts import Parts


def check(*gradients: torch.Tensor) -> tuple[FiniteCheck, list[torch.nn.Parameter]]:
    params = [torch.nn.Parameter(torch.zeros(one.shape, dtype=one.dtype)) for one in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    found = FiniteCheck(torch.device("cpu"))
    found.look(gradients)
    return found, params


def is_bad(found: FiniteCheck) -> bool:
    return bool(found.nonfinite(torch.tensor(1.0), None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf])
def test_only_what_is_not_finite_is_found(dtype: torch.dtype, bad: float) -> None:
    large = torch.full(
        (100,), min(1e30, torch.finfo(dtype).max), dtype=dtype
    )  # in fp32, their squares add up to infinity
    large[7] += bad
    expanded, sparse = torch.ones(1, dtype=dtype).expand(3), torch.eye(3, dtype=dtype).to_sparse()
    for others in ((), (torch.ones(2, dtype=torch.float64),), (expanded,), (sparse,), (torch.ones(0, dtype=dtype),)):
        found, _ = check(*others, large)
        assert is_bad(found) == bool(bad)
        found.begin()
        assert not is_bad(found), "it is of the step before"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_fault_of_the_gradients(bad: float) -> None:
    found, params = check(torch.ones(2), torch.ones(2, dtype=torch.complex64))
    assert found.nonfinite(torch.tensor(bad), None).item() == 1
    assert found.failure(0, params, Parts(torch.nn.Linear(1, 1), lambda model, batch: None)) is None


def test_gradients_keep_their_bits_when_they_are_looked_at() -> None:
    gradient = torch.tensor([-0.0, 1e-42, -3.4e38, math.nan, math.inf])
    before = gradient.clone()
    assert is_bad(check(gradient)[0])
    assert torch.equal(gradient.view(torch.int32), before.view(torch.int32))


def test_the_weight_is_named_whose_gradient_is_not_finite() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    parts, params = Parts(model, lambda model, batch: None), list(model.parameters())
    for param in params:
        param.grad = torch.full_like(param, 1e30)
    found = FiniteCheck(torch.device("cpu"))
    found.look(param.grad for param in params)
    assert found.failure(1, params, parts) is None
    assert params[2].grad is not None
    params[2].grad[0, 1] = math.inf
    found.look(param.grad for param in params)
    failure = found.failure(1, params, parts)
    assert failure is not None
    assert failure.rank == 1
    assert failure.message.startswith("the gradient of 1.weight became inf, though the loss is finite")
