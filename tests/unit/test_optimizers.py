"""Switching how an update is computed keeps its state."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from gpumem_nb.engine import optimizers
from gpumem_nb.errors import WorkloadError
from gpumem_nb.settings import KNOBS, Settings

IMPLEMENTATIONS = KNOBS["optimizer_impl"].choices


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_every_switch_of_implementation_gives_the_unswitched_weights(name: str) -> None:
    for before, after in itertools.permutations(IMPLEMENTATIONS, 2):
        torch.manual_seed(0)
        switched, plain = nn.Linear(3, 2), nn.Linear(3, 2)
        plain.load_state_dict(switched.state_dict())
        settings = Settings(optimizer=name, learning_rate=0.01)
        one = optimizers.build(switched.parameters(), settings.replace(optimizer_impl=before))
        other = optimizers.build(plain.parameters(), settings)
        for _ in range(3):
            step(switched, one)
            step(plain, other)
        optimizers.set_implementation(one, after)
        for _ in range(3):
            step(switched, one)
            step(plain, other)
        torch.testing.assert_close(switched.weight, plain.weight, rtol=1e-5, atol=1e-7)


def test_an_optimizer_without_that_implementation_says_so() -> None:
    own = torch.optim.RMSprop(nn.Linear(2, 2).parameters())
    optimizers.set_implementation(own, "default")
    with pytest.raises(WorkloadError, match="RMSprop has no fused implementation"):
        optimizers.set_implementation(own, "fused")


def test_the_learning_rate_keeps_the_proportions_of_groups() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    own = torch.optim.SGD([{"params": a.parameters(), "lr": 0.1}, {"params": b.parameters(), "lr": 0.01}])
    optimizers.set_learning_rate(own, 0.5)
    assert [group["lr"] for group in own.param_groups] == pytest.approx([0.5, 0.05])
