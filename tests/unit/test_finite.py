"""Gradients that are no numbers are found, and those that are only large are not taken for such."""

from __future__ import annotations

import pytest
import torch

from gpumem_nb.engine.step.gradients import GradientNorms


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [False, True])
def test_only_what_is_not_finite_is_found(dtype: torch.dtype, bad: bool) -> None:
    param = torch.nn.Parameter(torch.zeros(100, dtype=dtype))
    param.grad = torch.full((100,), 6e4, dtype=dtype)
    if bad:
        param.grad[7] = float("nan")
    assert bool(GradientNorms([param]).nonfinite(torch.tensor(1.0), None)) == bad
