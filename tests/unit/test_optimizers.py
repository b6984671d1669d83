"""Switching how an update is computed keeps its state."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from gpumem_nb.engine.step import optimizers
from gpumem_nb.engine.undo.step_undo import UpdateUndo
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.knobs import KNOBS
from gpumem_nb.shared.settings import Settings

IMPLEMENTATIONS = KNOBS["optimizer_impl"].choices


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "adafactor"])
def test_every_switch_of_implementation_gives_the_unswitched_weights(name: str) -> None:
    has = [one for one in IMPLEMENTATIONS if (name, one) != ("adafactor", "fused")]
    for before, after in itertools.permutations(has, 2):
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


def test_an_optimizer_without_fused_kernels_has_the_others() -> None:
    own = torch.optim.NAdam((net := nn.Linear(3, 2)).parameters())
    for name, foreach in (("foreach", True), ("loop", False), ("default", None)):
        optimizers.set_implementation(own, name)
        assert own.param_groups[0]["foreach"] is foreach
        step(net, own)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_default_is_what_an_own_optimizer_came_with(kind: type[torch.optim.Optimizer]) -> None:
    own = kind(nn.Linear(2, 2).parameters(), lr=0.1, fused=True)  # type: ignore[call-arg]
    for name in ("default", "loop", "default"):
        optimizers.set_implementation(own, name)
        assert own.param_groups[0]["fused"] is (name == "default")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_every_implementation_of_a_fused_optimizer_works_with_loss_scaling(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 2)
    own = kind(model.parameters(), lr=0.1, fused=True)  # type: ignore[call-arg]
    scaler = torch.amp.GradScaler("cpu")
    for name in IMPLEMENTATIONS:
        optimizers.set_implementation(own, name)
        before = model.weight.detach().clone()
        model.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).square().sum()).backward()
        scaler.unscale_(own)
        scaler.step(own)
        scaler.update()
        assert not torch.equal(model.weight, before)


def test_an_overflow_before_the_first_update_leaves_momentum_untouched() -> None:
    model = nn.Linear(3, 2)
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    optimizers.set_implementation(own, "default")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(4, 3)).sum() * float("inf")).backward()
    scaler.step(own)
    assert not own.state, "torch's fused kernel would keep a buffer that nobody filled"


def test_the_counter_of_a_capturable_optimizer_stays_on_its_device() -> None:
    param = nn.Parameter(torch.empty(2, device="meta"))
    own = torch.optim.Adam([param], capturable=True)
    own.state[param]["step"] = torch.zeros((), device="meta")
    optimizers.set_implementation(own, "loop")
    assert own.state[param]["step"].is_meta


def test_an_undone_update_leaves_nothing_of_the_scaler() -> None:
    model = nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    undo = UpdateUndo(model.parameters(), own)
    own.grad_scale, own.found_inf = None, torch.zeros(())  # type: ignore[attr-defined]
    undo.undo()
    assert not {"grad_scale", "found_inf"} & vars(own).keys()
