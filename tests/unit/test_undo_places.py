"""What a step that is undone puts back, by where it lies: in classes, objects, functions, optimizers, other weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpumem_nb.engine.data.held_out import as_held_out
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo, UpdateUndo
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_one_rank import loss, rows, stream, tried

WIDTH = 4
SEEN: dict[str, list[int]] = {"x": []}


def farther() -> None:
    SEEN["x"].append(1)


def far() -> None:
    farther()


class Counting(nn.Module):
    log: ClassVar[dict[str, list[int]]] = {"loss": []}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.a = SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(h=[], g={"x": {"y": []}})))

    def forward(self, x: Tensor) -> Tensor:
        self.log["loss"].append(1)
        self.a.b.c.h.append(1)
        self.a.b.c.g["x"]["y"].append(1)
        far()
        return cast(Tensor, self.linear(x))


class Inheriting(Counting):
    pass


@pytest.mark.parametrize("kind", [Counting, Inheriting])
def test_containers_in_classes_objects_and_functions_are_put_back(kind: Callable[[], Counting]) -> None:
    net = kind()

    def told() -> tuple[int, ...]:
        c = net.a.b.c
        return len(net.log["loss"]), len(c.h), len(c.g["x"]["y"]), len(SEEN["x"])

    state = ForwardState([net], loss)
    for _ in range(2):
        before = told()
        undo = ForwardUndo(state)
        net(torch.ones(2, WIDTH))
        assert told() == tuple(number + 1 for number in before)
        undo.undo()
        assert told() == before
        net(torch.ones(2, WIDTH))


@pytest.mark.parametrize("mask", [torch.eye(4).to_sparse(), torch.empty(3, device="meta")], ids=["sparse", "meta"])
def test_an_optimizer_that_holds_what_cannot_be_copied_trains_and_is_put_back(mask: Tensor) -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.mask, self.ema = mask, nn.Linear(2, 2)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.ema.weight.add_(1)

    net = nn.Linear(2, 2)
    optimizer = Own(net.parameters())
    held = optimizer.ema.weight.detach().clone()
    undo = UpdateUndo(net.parameters(), optimizer)
    optimizer.step()
    undo.undo()
    assert torch.equal(optimizer.ema.weight, held)
    assert optimizer.mask is mask


class Momentum(nn.Module):
    """A key encoder that forward averages, beside a frozen part that has more bytes than what is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Linear(WIDTH, 400_000).requires_grad_(False)
        self.into = nn.Linear(WIDTH, 600)
        self.query = nn.Linear(600, 600)
        self.key = nn.Linear(600, 600).requires_grad_(False)
        self.out = nn.Linear(600, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.key.weight.mul_(0.9).add_(self.query.weight, alpha=0.1)
        hidden = self.into(x) + self.backbone(x)[:, :600]
        return cast(Tensor, self.out(self.query(hidden) + self.key(hidden)))


@pytest.mark.usefixtures("alone")
def test_evaluations_and_questions_leave_a_momentum_encoder_beside_a_large_frozen_part() -> None:
    net = Momentum()
    held_out = as_held_out(TensorDataset(torch.randn(6, WIDTH), torch.randn(6, WIDTH)))
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-6)
    workload = Workload("momentum", lambda: net, rows, loss, optimizer=lambda params: optimizer)
    trainer = Trainer(workload, stream(), opened(), time.time(), held_out)
    settings = Settings(batch_size=2, optimizer="own", learning_rate=1e-6)
    held = net.key.weight.detach().clone()
    assert tried(trainer, settings) is None
    assert torch.equal(net.key.weight, held), "a question before the first step"
    assert trainer.run(Chunk(settings, 1, 2)).failure is None
    held = net.key.weight.detach().clone()
    reply = trainer.run(Chunk(settings, 1, 0, evaluate=True))
    assert reply.failure is None
    assert reply.evaluated
    assert torch.equal(net.key.weight, held), "an evaluation"
