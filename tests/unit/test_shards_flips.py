"""``shard_optimizer`` on a live model, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Optimizer
from torch.utils.data import TensorDataset

from gpumem_nb.engine.link.communicator import Communicator
from gpumem_nb.engine.step.live_model import LiveModel
from gpumem_nb.engine.step.muon import MuonAndAdamW
from gpumem_nb.engine.step.optimizer_state import state_of
from gpumem_nb.engine.step.shards import why_not
from gpumem_nb.engine.step.sharing import Sharing
from gpumem_nb.kernel import compatibility
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload, WorkloadInfo
from tests.threads import Meeting
from tests.unit.test_shards import ON, in_numbers, net, same


def live(ranks: int) -> LiveModel:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output: Tensor = model(batch[0])
        return output.square().mean()

    return LiveModel(Workload("net", net, lambda: TensorDataset(torch.ones(2, 3)), loss), opened(), ranks)


def test_an_optimizer_that_was_put_aside_as_shares_comes_back_whole_and_the_other_way_round() -> None:
    models = [live(2) for _ in range(2)]  # one after the other: modules draw random numbers when they are made

    def flipped(link: Communicator) -> Any:
        model = models[link.rank]

        def apply(**knobs: Any) -> None:
            settings = Settings(**knobs)
            model.join_shards(settings)
            model.apply(settings)

        def whole() -> Any:
            found = state_of(model.optimizer).gather()
            return in_numbers(found) if link.rank == 0 else None

        for param in model.parameters:
            param.grad = torch.ones_like(param)
        model.optimizer.step()
        before = whole()
        apply(shard_optimizer="on")
        apply(shard_optimizer="on", optimizer="sgd")
        apply(optimizer="sgd")
        apply()
        assert state_of(model.optimizer).partition is None
        once = whole()
        apply(optimizer="sgd")
        apply(optimizer="sgd", shard_optimizer="on")
        apply(shard_optimizer="on")
        assert state_of(model.optimizer).partition is not None
        return before, once, whole()

    (before, once, twice), _ = Meeting(2).run(flipped)
    assert before
    assert same(once, before)
    assert same(twice, before)


def test_settings_that_do_not_go_with_it_are_refused_in_the_notebook() -> None:
    for name in ("adafactor", "adamw8bit", "muon"):
        with pytest.raises(InvalidInput, match=f"cannot be used with optimizer={name}.*Use shard_optimizer=off, or"):
            Settings(optimizer=name, shard_optimizer="on").check_together(2)
    assert WorkloadInfo("net", 1, 4, 1, 0, why_whole="").handles.shards
    alone = WorkloadInfo("net", 1, 4, 1, 0, why_whole="there is one rank")
    with pytest.raises(InvalidInput, match="there is one rank"):
        compatibility.check(Settings(shard_optimizer="on", batch_size=1), alone, 1)
    assert compatibility.resumed(Settings(shard_optimizer="on"), ("shard_optimizer",), alone) == Settings()


class Own(SGD):
    pass


def hooked(params: Any) -> Optimizer:
    optimizer = SGD(params)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def muon(params: Any) -> Optimizer:
    return MuonAndAdamW(params, lr=0.1)


def of_one_memory(params: Any) -> Optimizer:
    return SGD([*params, nn.Parameter(params[-1].data)])


def twice_in_a_group(params: Any) -> Optimizer:
    with pytest.warns(UserWarning, match="duplicate parameters"):
        return SGD([params[-1], *params])


def of_one_storage(params: Any) -> Optimizer:
    whole = torch.zeros(300)
    return SGD([nn.Parameter(whole[:200]), nn.Parameter(whole[200:])])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Adafactor, "Adafactor is none of them. Use shard_optimizer=off with it"),
        (LBFGS, "LBFGS is none of them"),
        (Own, "Own is none of them"),
        (muon, "MuonAndAdamW is none of them"),
        (hooked, "hooks before the step of this SGD nothing but a share of the weights. Use shard_optimizer=off"),
        (of_one_memory, "one of shape (65,) lies in the memory of another or is in the optimizer's groups twice"),
        (twice_in_a_group, "one of shape (65,) lies in the memory of another or is in the optimizer's groups twice"),
    ],
)
def test_others_are_refused_by_name(make: Callable[..., Optimizer], said: str) -> None:
    optimizer = make(list(net().parameters()))
    assert said in why_not(optimizer)
    with pytest.raises(WorkloadError, match="shard_optimizer=on"):
        Sharing(2).apply(optimizer, ON, tried=True)
    Sharing(1).apply(optimizer, ON, tried=False)  # alone it has all of it anyway


def test_weights_that_lie_beside_each_other_in_one_memory_are_shared() -> None:
    assert not why_not(of_one_storage([]))
