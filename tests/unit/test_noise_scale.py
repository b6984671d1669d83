"""The gradient noise scale, from squared norms of gradients of known noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gpumem_nb.engine.step.gradients import EVERY_STEPS, NoiseScale, is_measured, square_of

DIMENSIONS = 500


@pytest.mark.parametrize(("ranks", "samples", "wanted"), [(2, 4, 20.0), (2, 64, 20.0), (4, 8, 300.0), (3, 2, 1.0)])
def test_it_is_the_analytic_one_within_a_tenth(ranks: int, samples: int, wanted: float) -> None:
    """Of a quadratic loss: gradients of samples are the true one and noise of a known variance, alike in all."""
    numbers = torch.Generator().manual_seed(1)
    true = torch.randn(DIMENSIONS, generator=numbers)
    deviation = math.sqrt(wanted * float(true.square().sum()) / DIMENSIONS)
    scale, found = NoiseScale(ranks), None
    for step in range(150):
        noise = torch.randn(ranks, DIMENSIONS, generator=numbers) * deviation / math.sqrt(samples)
        own = true + noise
        loss_scale = 1024.0 if step % 2 else 1.0
        of_ranks, average = own.square().sum(dim=1).mean().item(), own.mean(dim=0).square().sum().item()
        found = scale.add(of_ranks * loss_scale**2, average * loss_scale**2, samples, loss_scale)
    assert found == pytest.approx(wanted, rel=0.1)


def test_what_is_no_number_is_left_out_and_noise_without_a_gradient_is_no_estimate() -> None:
    scale = NoiseScale(2)
    before = scale.add(3.0, 2.0, 8)
    assert before == pytest.approx(16)
    assert scale.add(math.inf, 2.0, 8) is None
    assert scale.add(0.0, 0.0, 8) is None
    assert scale.add(3.0, 2.0, 8) == pytest.approx(before)
    assert NoiseScale(2).add(2.0, 1.0, 8) is None, "the average of two is as small as noise alone would be"


def test_the_square_is_that_of_all_gradients_in_every_type() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        layer = nn.Linear(3, 2).to(dtype)
        layer.weight.grad = torch.full_like(layer.weight, 300.0)
        assert square_of(layer.parameters()).item() == pytest.approx(6 * 300.0**2, rel=1e-6)
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert square_of(table.parameters()).item() == 2 * 2**2 + 2 * 1
    assert square_of([nn.Linear(1, 1).weight]).item() == 0


def test_one_rank_measures_nothing_and_several_one_step_in_twenty() -> None:
    assert not any(is_measured(step, 1) for step in range(100))
    assert sum(is_measured(step, 2) for step in range(100)) == 100 // EVERY_STEPS
