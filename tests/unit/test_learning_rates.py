"""Who sets learning rates: a flip that names them, a cell, a scheduler; each against a plain loop of torch's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from gpumem_nb.engine import cells
from gpumem_nb.engine.attach import attached
from gpumem_nb.engine.step.rates import Rates
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.kernel import compatibility
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone
from tests.unit.test_one_rank import loss, rows, stream, tried

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "warm-up from 0": lambda own: lr_scheduler.LambdaLR(own, lambda step: min(1.0, step / 4)),
    "steps": lambda own: lr_scheduler.MultiStepLR(own, [2, 4], gamma=0.5),
    "cosine": lambda own: lr_scheduler.CosineAnnealingLR(own, 10),
    "one cycle": lambda own: lr_scheduler.OneCycleLR(own, max_lr=0.1, total_steps=20),
    "chained": lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.LinearLR(own, 0.1, total_iters=3), lr_scheduler.ExponentialLR(own, 0.9)], milestones=[3]
    ),
    "steps after a warm-up": lambda own: lr_scheduler.SequentialLR(
        own, [lr_scheduler.LinearLR(own, 0.1, total_iters=4), lr_scheduler.MultiStepLR(own, [1, 2])], milestones=[4]
    ),
}


class Bench:
    """The same small model twice: trained by a trainer, and by a plain loop on the same data."""

    def __init__(self, scheduler: Callable[[Optimizer], Any] | None = None, rate: float = 0.1) -> None:
        self.model, self.plain_model = (self._model() for _ in range(2))
        self.own, self.plain = (self._optimizer(model, rate) for model in (self.model, self.plain_model))
        self.scheduler, self.plain_scheduler = (scheduler and scheduler(own) for own in (self.own, self.plain))
        self.ids = 0
        self.trainer = self.another()
        self.settings = compatibility.adapted(Settings(batch_size=2), self.trainer.info())

    @staticmethod
    def _model() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    @staticmethod
    def _optimizer(model: Any, rate: float) -> Optimizer:
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": rate / 10}]
        return torch.optim.SGD(groups, lr=rate, momentum=0.9)

    def another(self) -> Trainer:
        """A trainer of the attached objects."""
        names: dict[str, str | None] = {"model": "net", "data": "data", "loss": "loss", "optimizer": "own"}
        objects = {"net": self.model, "data": rows(), "loss": loss, "own": self.own, "sched": self.scheduler}
        workload = attached(names | ({"scheduler": "sched"} if self.scheduler else {}), objects)
        return Trainer(workload, stream(), opened(), time.time())

    def train(self, steps: int, **knobs: Any) -> list[float | None]:
        """Train under these knobs too; returns the rates of the steps, as samples have them."""
        before, self.settings = self.settings, self.settings.replace(**knobs)
        self.ids += self.settings != before or not self.ids
        reply = self.trainer.run(Chunk(self.settings, self.ids, steps))
        assert reply.failure is None
        return [sample.learning_rate for sample in reply.samples]

    def ask(self, **knobs: Any) -> None:
        """Take a step under these knobs and undo it."""
        assert tried(self.trainer, self.settings.replace(**knobs)) is None

    def train_plainly(self, steps: int) -> list[float]:
        """The same with torch alone."""
        rates = []
        for _ in range(steps):
            rates.append(self.plain.param_groups[0]["lr"])
            self.plain.zero_grad()
            loss(self.plain_model, [torch.ones(2, 4)]).backward()
            self.plain.step()
            if self.plain_scheduler:
                self.plain_scheduler.step()
        return rates

    def check_same(self) -> None:
        """Both models hold the same bits."""
        assert [group["lr"] for group in self.own.param_groups] == [group["lr"] for group in self.plain.param_groups]
        for ours, plain in zip(self.model.parameters(), self.plain_model.parameters(), strict=True):
            assert torch.equal(ours, plain)


def set_rates(optimizer: Optimizer, *rates: float) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def test_a_rate_that_a_cell_set_survives_the_flip_of_another_knob() -> None:
    bench = Bench()
    bench.train(2)
    bench.train_plainly(2)
    for optimizer in (bench.own, bench.plain):
        set_rates(optimizer, 0.03, 0.001)
    assert bench.train(2, clip_norm=1e9) == bench.train_plainly(2) == [0.03, 0.03]
    bench.check_same()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_as_in_a_plain_loop_whatever_is_flipped(kind: str) -> None:
    bench = Bench(SCHEDULERS[kind])
    rates = bench.train(3) + bench.train(3, checkpointing="blocks") + bench.train(2, optimizer_impl="loop")
    assert rates == bench.train_plainly(8)
    bench.check_same()


def test_a_scheduler_does_not_advance_in_steps_that_are_undone() -> None:
    bench = Bench(SCHEDULERS["cosine"])
    bench.train(2)
    bench.ask(learning_rate=0.5, batch_size=4)
    assert bench.trainer.record() is not None
    bench.train(2)
    bench.train_plainly(4)
    bench.check_same()


def test_a_flip_of_the_rate_that_is_taken_back_before_a_step_leaves_the_rates_as_they_were() -> None:
    bench = Bench()
    bench.train(1)
    bench.train_plainly(1)
    for optimizer in (bench.own, bench.plain):
        set_rates(optimizer, 0.03, 0.001)
    bench.train(0, learning_rate=0.7)
    bench.train(0, learning_rate=0.9)
    assert bench.own.param_groups[0]["lr"] == 0.9
    bench.train(0, learning_rate=0.1)
    bench.train(1)
    bench.train_plainly(1)
    bench.check_same()


def test_a_flip_that_names_the_rate_scales_all_groups() -> None:
    bench = Bench()
    bench.train(1, learning_rate=0.2)
    assert [group["lr"] for group in bench.own.param_groups] == pytest.approx([0.2, 0.02])


def test_a_rate_of_zero_keeps_the_proportions_of_groups() -> None:
    optimizer = Bench._optimizer(Bench._model(), 0.1)
    rates = Rates(optimizer, 0.1)
    rates.follow(0.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0, 0]
    rates.settle()
    rates.follow(0.4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.04])


def test_a_warm_up_that_begins_at_zero_can_be_attached_and_flipped() -> None:
    bench = Bench(SCHEDULERS["warm-up from 0"])
    assert bench.trainer.live.settings.learning_rate == 0.1
    assert bench.trainer.info().own_learning_rate == 0.1
    assert bench.train(1) == [0.0]
    bench.train(1, learning_rate=0.4)
    assert bench.train(0, optimizer="adam") == []
    assert bench.trainer.live.optimizer.param_groups[0]["lr"] > 0


def test_the_rate_goes_with_a_flip_of_the_optimizer_that_does_not_name_it() -> None:
    bench = Bench()
    bench.train(1)
    set_rates(bench.own, 0.03, 0.003)
    bench.train(1, optimizer="adam")
    assert bench.trainer.live.optimizer.param_groups[0]["lr"] == 0.03
    bench.train(1, optimizer="own")
    assert [group["lr"] for group in bench.own.param_groups] == [0.03, 0.003]
    bench.train(1, optimizer="sgd", learning_rate=0.5)
    assert bench.trainer.live.optimizer.param_groups[0]["lr"] == 0.5
    bench.train(1, optimizer="own")
    assert [group["lr"] for group in bench.own.param_groups] == pytest.approx([0.5, 0.05])


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    rate = optimizer.param_groups[0]["lr"]
    rates = Rates(optimizer, 0.1)
    rates.follow(0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rates.first == rate.item() == pytest.approx(0.5)


def test_schedulers_that_cannot_work_are_refused() -> None:
    model = nn.Linear(4, 2)
    own, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))

    def trainer(scheduler: Any, optimizer: Any = own) -> Trainer:
        workload = Workload(
            "refused", lambda: model, rows, loss, optimizer=lambda params: optimizer, scheduler=lambda own: scheduler
        )
        return Trainer(workload, stream(), opened(), time.time())

    with pytest.raises(WorkloadError, match="ReduceLROnPlateau waits for a metric"):
        trainer(lr_scheduler.ReduceLROnPlateau(own))
    with pytest.raises(WorkloadError, match="StepLR changes an optimizer that is not trained with"):
        trainer(lr_scheduler.StepLR(other, 1))
    with pytest.raises(WorkloadError, match="lr_scheduler; this is a function"):
        trainer(lambda step: 0.1)
    with pytest.raises(WorkloadError, match="name the optimizer that it was built for"):
        attached(
            {"model": "m", "data": "d", "scheduler": "s"}, {"m": model, "d": [1], "s": lr_scheduler.StepLR(own, 1)}
        )


def test_a_scheduler_that_raises_fails_the_next_step_and_keeps_the_one_before() -> None:
    def rate(step: int) -> float:
        if step == 2 and broken:
            raise ValueError("no rate for step 2")
        return 1.0

    broken = True
    bench = Bench(lambda own: lr_scheduler.LambdaLR(own, rate))
    assert len(bench.train(2)) == 2
    reply = bench.trainer.run(Chunk(bench.settings, bench.ids, 1))
    assert reply.failure is not None
    assert reply.failure.message.endswith("a step hook or the scheduler failed: ValueError: no rate for step 2")
    assert [sample.event for sample in reply.samples] == ["error"]
    broken = False
    assert bench.trainer.run(Chunk(bench.settings, bench.ids + 1, 1)).failure is None
    bench.plain_scheduler = None
    bench.train_plainly(3)
    bench.check_same()


def test_what_a_cell_put_in_place_of_a_rate_does_not_spread_to_other_groups() -> None:
    bench = Bench()
    bench.train(2)
    bench.own.param_groups[0]["lr"] = None
    cells.one_more()
    bench.settings = bench.settings.replace(learning_rate=0.2)
    reply = bench.trainer.run(Chunk(bench.settings, bench.ids + 1, 1))
    assert reply.failure is not None
    assert "learning rate" in reply.failure.message
    assert [group["lr"] for group in bench.own.param_groups] == [None, pytest.approx(0.02)]
    bench.own.param_groups[0]["lr"] = 0.1
    bench.settings, bench.ids = bench.settings.replace(learning_rate=0.1), bench.ids + 2
    assert bench.train(1) == [pytest.approx(0.1)]
    assert bench.own.param_groups[1]["lr"] == pytest.approx(0.01)
