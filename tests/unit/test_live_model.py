"""A live model is brought to other settings knob by knob, and always knows what it is under."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from gpumem_nb.engine.step.live_model import LiveModel
from gpumem_nb.engine.step.notes import has_batch_norm
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload


def blocks() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])


def rows() -> TensorDataset:
    return TensorDataset(torch.ones(2, 4))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = model(batch)
    return output.square().mean()


def own(params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.RMSprop(params, lr=0.5)


def live(workload: Workload) -> LiveModel:
    return LiveModel(workload, opened())


def update(live: LiveModel) -> None:
    loss(live.model, torch.ones(2, 4)).backward()
    live.optimizer.step()
    live.model.zero_grad()


def hooks(live: LiveModel) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in live.model.modules())


def moments(live: LiveModel) -> list[Tensor]:
    return [value.clone() for state in live.optimizer.state.values() for value in state.values()]


def test_each_knob_set_twice_is_as_set_once() -> None:
    model = live(Workload("plain", blocks, rows, loss))
    update(model)
    for settings in (Settings(), Settings(checkpointing="sqrt", optimizer="momentum", learning_rate=0.25)):
        model.apply(settings)
        update(model)
        before = (model.optimizer, hooks(model), model.optimizer.param_groups[0]["lr"], model.settings)
        kept = moments(model)
        model.recomputing.set_checkpointing(settings)
        model.set_optimizer(settings)
        model.set_optimizer_impl(settings.optimizer_impl)
        model.set_learning_rate(settings)
        assert (model.optimizer, hooks(model), model.optimizer.param_groups[0]["lr"], model.settings) == before
        assert all(map(torch.equal, moments(model), kept))


def test_settings_say_what_was_applied_before_one_that_does_not_fit() -> None:
    model = live(Workload("plain", blocks, rows, loss, optimizer=own))
    model.apply(usual := Settings(optimizer="adam"))
    update(model)
    kept = moments(model)
    with pytest.raises(WorkloadError, match="RMSprop has no fused implementation"):
        model.apply(Settings(checkpointing="blocks", optimizer="own", optimizer_impl="fused", learning_rate=0.1))
    assert model.settings == usual.replace(checkpointing="blocks", optimizer="own")
    assert model.optimizer is model.own_optimizer
    model.apply(usual)
    assert (model.settings, hooks(model)) == (usual, 0)
    assert all(map(torch.equal, moments(model), kept)), "the optimizer before comes back with its state"


def test_checkpointing_comes_back_after_a_mode_that_could_not_be_set() -> None:
    found = True

    def named(model: nn.Module) -> list[nn.Module]:
        return list(model.children()) if found else []

    model = live(Workload("named", blocks, rows, loss, blocks=named))
    model.apply(Settings(checkpointing="blocks"))
    with model.recomputing.on():
        wrapped = hooks(model)
    found = False
    with pytest.raises(WorkloadError, match="needs a model with sub-modules"):
        model.apply(Settings(checkpointing="sqrt"))
    assert (model.settings.checkpointing, hooks(model)) == ("none", 0)
    found = True
    model.apply(Settings(checkpointing="blocks"))
    with model.recomputing.on():
        assert hooks(model) == wrapped > 0
    assert hooks(model) == 0, "cells find a plain model"


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_batch_norm_takes_no_statistics_from_micro_batches(frozen: bool) -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm)
    norm.train(not frozen)
    assert has_batch_norm(live(Workload("norm", lambda: model, rows, loss))) is not frozen


def test_a_weight_may_get_another_shape_if_no_optimizer_trains_it() -> None:
    net: Any = blocks()
    net[0].requires_grad_(False)
    model = live(Workload("plain", lambda: net, rows, loss, optimizer=lambda params: own(net[1:].parameters())))
    net[0][0].weight.data = torch.zeros(5, 4)
    model.refuse_strangers()
    net[1][0].weight.data = torch.zeros(5, 4)
    with pytest.raises(WorkloadError, match=r"1\.0\.weight has shape \(5, 4\) now and had \(4, 4\)"):
        model.refuse_strangers()


def test_weights_that_are_added_later_get_the_rate_of_a_knobs_optimizer_as_it_is_then() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    brought = torch.optim.SGD(net[0].parameters(), lr=0.5)
    model = live(Workload("grows", lambda: net, rows, loss, optimizer=lambda params: brought))
    for rate in (0.1, 0.001):
        model.apply(Settings(optimizer="adam", learning_rate=rate))
        update(model)
        model.step_counted(skipped=False)
    brought.add_param_group({"params": net[1].parameters()})
    model.relist()
    assert {group["lr"] for group in model.optimizer.param_groups for _ in group["params"]} == {0.001}
    assert list(map(id, model.parameters)) == list(map(id, net.parameters()))
