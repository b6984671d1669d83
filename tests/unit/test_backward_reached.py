"""How far backward got is seen from the gradients: no hook on every weight tells of it."""

from __future__ import annotations

import time
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine.link import communicator
from gpumem_nb.engine.link.communicator import Single
from gpumem_nb.engine.step.gradients import NewGradients
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard, overheard
from tests.unit.test_one_rank import hooks, loss, rows, stream


@pytest.fixture(params=[Single, Overheard])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> communicator.Communicator:
    """A rank by itself, and one of two."""
    if request.param is Overheard:
        return overheard(monkeypatch)
    one = Single()
    monkeypatch.setattr(communicator, "_of_process", one)
    return one


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_module_is_named_that_backward_had_come_to(micro_batches: int) -> None:
    calls = count(1)

    def failing(model: nn.Sequential, batch: list[Tensor]) -> Tensor:
        def fail(gradient: Tensor) -> None:
            if next(calls) == micro_batches:
                raise ValueError("here")

        first: Tensor = model[0](batch[0])
        first.register_hook(fail)
        rest: Tensor = model[2](model[1](first))
        return rest.square().mean()

    trainer = Trainer(Workload("net", net, rows, failing), stream(), opened(), time.time())
    failure = trainer.run(Chunk(Settings(batch_size=2, accumulation_steps=micro_batches), 1, 1)).failure
    assert failure is not None
    assert (failure.phase, failure.module) == ("backward", "0 (Linear)")


@pytest.mark.usefixtures("link")
def test_a_loss_that_runs_backward_by_itself_is_refused_in_any_micro_batch() -> None:
    calls = count(1)

    def stepping(model: nn.Sequential, batch: list[Tensor]) -> Tensor:
        if next(calls) == 2:
            loss(model, batch).backward()
        return loss(model, batch)

    trainer = Trainer(Workload("net", net, rows, stepping), stream(), opened(), time.time())
    failure = trainer.run(Chunk(Settings(batch_size=2, accumulation_steps=2), 1, 1)).failure
    assert failure is not None
    assert "The loss calls backward() by itself" in failure.message


def test_only_ranks_that_send_gradients_have_hooks_on_weights(link: communicator.Communicator) -> None:
    trainer = Trainer(Workload("net", net, rows, loss), stream(), opened(), time.time())
    assert trainer.run(Chunk(Settings(batch_size=2), 1, 2)).failure is None
    assert hooks(trainer.live.model) == (6 if link.size > 1 else 0)


def test_a_gradient_is_new_that_is_another_one_or_was_added_to() -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(4)]
    same, added, another, sparse = weights
    for weight in weights[:3]:
        weight.grad = torch.ones(2, 2)
    nn.functional.embedding(torch.tensor([0]), sparse, sparse=True).sum().backward()
    new = NewGradients.beside(weights)
    assert new.weights() == []
    added.sum().backward()
    another.grad = torch.ones(2, 2)
    nn.functional.embedding(torch.tensor([0]), sparse, sparse=True).sum().backward()
    assert list(map(id, new.weights())) == list(map(id, (added, another, sparse)))
    assert same.grad is not None
    assert NewGradients.from_none(weights).weights() == []
    assert all(weight.grad is None for weight in weights)
