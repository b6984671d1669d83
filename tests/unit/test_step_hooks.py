"""Hooks around an optimizer's update run for updates that count, once each and in torch's order, and for no others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpumem_nb.engine.link.communicator import here
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk, ChunkReply
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone
from tests.unit.test_one_rank import loss, rows, stream, tried

SETTINGS = Settings(batch_size=2, optimizer="own", learning_rate=0.1)


@pytest.fixture
def ran() -> list[str]:
    return []


@pytest.fixture
def own(ran: list[str]) -> Iterator[Optimizer]:
    """An optimizer with every kind of hook."""

    def note(what: str) -> Any:
        return lambda *_: ran.append(what)

    torch.manual_seed(5)
    optimizer = SGD(nn.Linear(4, 2).parameters(), lr=0.1)
    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    handles = [
        register_optimizer_step_pre_hook(note("before any")),
        register_optimizer_step_post_hook(note("after any")),
    ]
    yield optimizer
    for handle in handles:
        handle.remove()


class Held(nn.Module):
    """A module around the weights that an optimizer was built on."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self.weight, self.bias = optimizer.param_groups[0]["params"]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Average:
    """Of the weights as they are before each update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.weight = weights(optimizer)
        self.updates = 0

    def advance(self, optimizer: Optimizer, *_: Any) -> None:
        self.weight.lerp_(weights(optimizer), 0.5)
        self.updates += 1


def trained_with(optimizer: Optimizer, forward: Any = loss) -> Trainer:
    model = Held(optimizer)
    workload = Workload("hooked", lambda: model, rows, forward, optimizer=lambda params: optimizer)
    return Trainer(workload, stream(), opened(), time.time())


def test_hooks_run_around_every_update_that_counts(own: Optimizer, ran: list[str]) -> None:
    seen: list[bool] = []
    own.register_step_post_hook(lambda optimizer, *_: seen.append(own.param_groups[0]["params"][0].grad is not None))
    assert trained_with(own).run(Chunk(SETTINGS, 1, 2)).failure is None
    assert ran == 2 * ["before any", "before", "after", "after any"]
    assert seen == [True, True], "gradients are there as in torch"


def test_no_hooks_run_in_trials_and_recorded_steps(own: Optimizer, ran: list[str]) -> None:
    trainer = trained_with(own)
    trainer.run(Chunk(SETTINGS, 1, 1))
    ran.clear()
    assert tried(trainer, SETTINGS.replace(batch_size=4)) is None
    assert trainer.record() is not None
    assert not ran
    assert trainer.run(Chunk(SETTINGS, 1, 1)).failure is None
    assert ran == ["before any", "before", "after", "after any"]


def test_hooks_leave_no_trace_when_another_rank_could_not_update(
    own: Optimizer, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    average = Average(own)
    own.register_step_pre_hook(average.advance)
    trainer = trained_with(own)
    trainer.run(Chunk(SETTINGS, 1, 2))
    before, so_far, updates = list(ran), average.weight.clone(), average.updates
    with monkeypatch.context() as patched:
        patched.setattr(here(), "any_rank", lambda vote, about: True)
        reply = trainer.run(Chunk(SETTINGS, 1, 1))
    assert [sample.event for sample in reply.samples] == ["discarded"]
    assert ran == before
    assert torch.equal(average.weight, so_far)
    assert average.updates == updates
    assert trainer.run(Chunk(SETTINGS, 2, 1)).failure is None
    assert not torch.equal(average.weight, so_far)
    assert average.updates == updates + 1


def test_an_update_that_the_loss_scaler_skips_has_no_hooks(own: Optimizer, ran: list[str]) -> None:
    def infinite(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return loss(model, batch).float() * 1e36

    trainer = trained_with(own, infinite)
    assert trainer.run(Chunk(SETTINGS.replace(precision="fp16"), 1, 1)).failure is None
    assert not ran


def test_a_hook_that_raises_after_an_update_that_counts_fails_the_step_after_it(own: Optimizer) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no average")

    trainer = trained_with(own)
    assert trainer.run(Chunk(SETTINGS, 1, 1)).failure is None
    handle = own.register_step_post_hook(fail)
    before = weights(own)
    assert trainer.run(Chunk(SETTINGS, 1, 1)).failure is None
    after = weights(own)
    assert not torch.equal(before, after)
    handle.remove()
    reply = trainer.run(Chunk(SETTINGS, 1, 1))
    assert told(reply) == (
        "after the update of the step before, which counts, a step hook or the scheduler failed: ValueError: no average"
    )
    assert torch.equal(weights(own), after)
    assert trainer.steps == 2
    assert trainer.run(Chunk(SETTINGS, 2, 1)).failure is None


def test_a_loss_that_updates_by_itself_is_refused_before_it_does() -> None:
    optimizer = SGD(nn.Linear(4, 2).parameters(), lr=0.1)

    def updating(model: nn.Module, batch: list[Tensor]) -> Tensor:
        result = loss(model, batch)
        optimizer.step()
        return result

    trainer = trained_with(optimizer, updating)
    before = weights(optimizer)
    reply = trainer.run(Chunk(SETTINGS, 1, 1))
    assert "The loss calls SGD.step() by itself: return the loss" in told(reply)
    assert torch.equal(weights(optimizer), before)
    optimizer.step()  # outside of a step nobody minds


def test_a_loss_that_runs_backward_by_itself_is_refused() -> None:
    optimizer = SGD(nn.Linear(4, 2).parameters(), lr=0.1)

    def going_back(model: nn.Module, batch: list[Tensor]) -> Tensor:
        loss(model, batch).backward()
        return loss(model, batch)

    trainer = trained_with(optimizer, going_back)
    reply = trainer.run(Chunk(SETTINGS, 1, 1))
    assert "The loss calls backward() by itself" in told(reply)
    assert all(param.grad is None for param in optimizer.param_groups[0]["params"])


def test_a_gradient_penalty_is_no_backward_of_its_own() -> None:
    optimizer = SGD(nn.Linear(4, 2).parameters(), lr=0.1)

    def penalised(model: nn.Module, batch: list[Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        result = loss(model, [x])
        (slope,) = torch.autograd.grad(result, x, create_graph=True)
        return result + slope.square().sum()

    assert trained_with(optimizer, penalised).run(Chunk(SETTINGS.replace(accumulation_steps=2), 1, 2)).failure is None


def told(reply: ChunkReply) -> str:
    assert reply.failure is not None
    return reply.failure.message


def weights(optimizer: Optimizer) -> Tensor:
    return torch.cat([param.detach().flatten() for param in optimizer.param_groups[0]["params"]])
