"""Questions about the user's own optimizers and losses: what they find, and that they change nothing."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from gpumem_nb.engine.attach import save_objects
from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.looks import model_facts, splits_to_mean
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.step.trials import beside_what_would_leave
from gpumem_nb.engine.undo.step_undo import UpdateUndo
from gpumem_nb.memory.device import opened
from gpumem_nb.memory.host_pool import HostUse
from gpumem_nb.shared.forecast import Forecast
from gpumem_nb.shared.messages import Chunk, Failure
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_one_rank import loss as squares
from tests.unit.test_one_rank import rows as few_rows
from tests.unit.test_one_rank import stream as few

OWN = Settings(batch_size=256, optimizer="own")
WIDTH, LABELS = 128, torch.tensor([0, 1, 1, 2, 3, 3, 3, 0] * 64)


@pytest.fixture(autouse=True)
def forgetful(alone: Overheard) -> None:
    """The link keeps no gradients, nor is anything left of earlier tests: both would take memory."""
    alone.keeps = False
    trained.clear()
    gc.collect()


trained: list[nn.Module] = []  # as a cell's variable, which an optimizer of the user's may use
averages: dict[str, Tensor] = {}


class Usual(Optimizer):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.01})

    @property
    def weights(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"] if param.grad is not None]


class ByVariable(Usual):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name, param in trained[0].named_parameters():
            param.data = 0.9 * param.data
            averages.setdefault(name, param.clone()).lerp_(param, 0.5)


class ByClosures(Usual):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params)
        self.updates = 0

        def rule(param: Tensor) -> None:
            self.updates += 1
            self.state[param].setdefault("mean", torch.zeros_like(param)).mul_(0.9)
            param.mul_(0.9)

        self.rules = [rule]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.weights:
            self.rules[0](param)


class Anew(Usual):
    """Keeps a mean that it computes anew in each update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.weights:
            assert param.grad is not None
            state = self.state[param]
            state["mean"] = 0.9 * state["mean"] + param.grad if "mean" in state else param.grad.clone()
            param.sub_(0.01 * state["mean"])


class InAttributes(Usual):
    """Keeps two means of its own, made in the first update, where torch's optimizers have none."""

    means: list[tuple[Tensor, Tensor]] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weights = self.weights
        if self.means is None:
            self.means = [(torch.zeros_like(param), torch.zeros_like(param)) for param in weights]
        for param, (mean, square) in zip(weights, self.means, strict=True):
            assert param.grad is not None
            mean.mul_(0.9).add_(param.grad, alpha=0.1)
            square.mul_(0.9).addcmul_(param.grad, param.grad, value=0.1)
            param.addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-4)


def network() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def rows() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(len(LABELS), WIDTH), LABELS)


def mean_square(model: nn.Module, batch: list[Tensor]) -> Tensor:
    output: Tensor = model(batch[0])
    return output.square().mean()


def trainer_of(
    optimizer: Callable[[Iterable[Tensor]], Optimizer] | None, loss: Any = mean_square, model: Any = network
) -> Trainer:
    stream = ShardedStream(*as_dataset(rows()), rank=0, size=1)
    return Trainer(Workload("mine", model, rows, loss, optimizer=optimizer), stream, opened(), time.time())


def forecast(trainer: Trainer, settings: Settings = OWN) -> Forecast:
    found = trainer.trials.forecast(settings, [settings.batch_size], [settings.batch_size], 0)
    assert found.failure is None
    return found.of[0]


def train(trainer: Trainer, steps: int, settings: Settings = OWN, settings_id: int = 1) -> int:
    """Return the highest live bytes of the steps."""
    reply = trainer.run(Chunk(settings, settings_id, steps))
    assert reply.failure is None
    return max(sample.live_peak_bytes for sample in reply.samples)


@pytest.mark.parametrize("kind", [ByVariable, ByClosures])
def test_an_optimizer_that_reaches_weights_by_another_way_changes_none_when_it_is_asked_about(
    kind: type[Optimizer],
) -> None:
    trainer = trainer_of(kind)
    optimizer = trainer.live.own_optimizer
    trained[:] = [trainer.live.model]
    averages.clear()
    before = [param.detach().clone() for param in trainer.live.parts.parameters()]
    forecast(trainer)
    assert trainer.trials.rehearse(OWN).steps_s
    assert all(map(torch.equal, trainer.live.parts.parameters(), before))
    assert not averages
    assert optimizer is not None
    assert not optimizer.state
    assert getattr(optimizer, "updates", 0) == 0
    train(trainer, 2)
    assert getattr(optimizer, "updates", 24) == 24


@pytest.mark.parametrize("kind", [torch.optim.AdamW, InAttributes])
def test_state_is_counted_before_the_first_step_wherever_an_optimizer_keeps_it(kind: type[Optimizer]) -> None:
    trainer = trainer_of(kind)
    before = forecast(trainer).live_peak_bytes
    weights = sum(param.nbytes for param in trainer.live.parameters)
    assert before - train(trainer, 1) >= 1.9 * weights
    assert before == pytest.approx(train(trainer, 2), rel=0.01)
    assert before == pytest.approx(forecast(trainer).live_peak_bytes, rel=0.01)


def test_state_that_each_update_computes_anew_is_there_once() -> None:
    trainer = trainer_of(Anew)
    before = forecast(trainer)
    train(trainer, 2)
    after = forecast(trainer)
    assert before.phase == after.phase == "backward"
    assert after.live_peak_bytes == pytest.approx(before.live_peak_bytes, rel=0.01)


def test_state_that_an_update_replaces_is_let_go_though_the_update_may_be_undone_and_comes_back_then() -> None:
    trainer = trainer_of(Anew)
    train(trainer, 2)
    optimizer = trainer.live.optimizer
    state = [values["mean"] for values in optimizer.state.values()]
    before, alive = [one.clone() for one in state], [weakref.ref(one) for one in state]
    kept = state.pop()  # by something else
    undo = UpdateUndo(trainer.live.parameters, optimizer)
    del state
    for values in optimizer.state.values():
        values["mean"] = values["mean"] + 1
    assert [one() is None for one in alive] == [True] * (len(alive) - 1) + [False]
    undo.undo()
    after = [values["mean"] for values in optimizer.state.values()]
    assert all(map(torch.equal, after, before))
    assert after[-1] is kept


def test_the_state_of_ones_own_optimizer_stays_beside_another_and_is_counted_when_it_is_asked_about() -> None:
    trainer = trainer_of(torch.optim.AdamW)
    train(trainer, 2)
    own = forecast(trainer).live_peak_bytes
    train(trainer, 2, OWN.replace(optimizer="adam"), 2)
    assert forecast(trainer, OWN).live_peak_bytes == pytest.approx(own, rel=0.01)


def noisy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """A mean over samples that draws twice, so that each micro-batch draws other numbers."""
    output: Tensor = model(batch[0] + torch.randn_like(batch[0]))
    return (output + torch.randn_like(output)).square().mean()


def weighted(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.logspace(-2, 1, WIDTH))


def centred(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """No mean over samples in training mode, as losses over pairs are that are left out in evaluations."""
    output: Tensor = model(batch[0])
    return (output - output.mean(0) if model.training else output).square().mean()


def drawing(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Draws in training mode alone."""
    output: Tensor = F.dropout(model(batch[0]), 0.5, model.training)
    return output.square().mean()


@pytest.mark.parametrize(
    ("loss", "found"), [(mean_square, True), (noisy, None), (weighted, False), (centred, False), (drawing, True)]
)
def test_a_loss_that_draws_is_not_said_to_be_no_mean_over_samples(loss: Any, found: bool | None) -> None:
    assert splits_to_mean(trainer_of(None, loss)) is found


def test_on_a_gpu_what_runs_out_beside_state_that_would_leave_does_not_say_that_nothing_fits() -> None:
    def found(kind: str, leaves: bool, asked: int, waiting: int = 0) -> str:
        state = {0: {"mean": torch.zeros(1000)}}
        host: Any = SimpleNamespace(host_bytes=HostUse(waiting, 2 * waiting, waiting))
        live: Any = SimpleNamespace(state_would_leave=leaves, optimizer=SimpleNamespace(state=state), recomputing=host)
        ran_out = Failure(0, "oom", "forward", "out of memory", asked_bytes=asked, free_bytes=100)
        device: Any = SimpleNamespace(kind=kind)
        failure = beside_what_would_leave(ran_out, live, device)
        assert failure is not None
        return failure.kind

    assert found("cuda", True, 4000) == "error"
    assert found("cuda", True, 5000) == found("cuda", True, 4000, waiting=4000) == "oom", "it would not fit then either"
    assert found("cuda", False, 4000) == found("virtual", True, 4000) == "oom"


@pytest.mark.parametrize("under_a_scheduler", [False, True])
def test_what_stands_in_place_of_an_optimizers_step_is_undone_after_questions_and_where_it_fails(
    under_a_scheduler: bool,
) -> None:
    net: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    own, average, updates, broken = torch.optim.Adam(net.parameters(), lr=0.01), copy.deepcopy(net), [0], [False]
    plain_step = own.step

    def step(self: Any, closure: Any = None) -> None:
        plain_step()
        updates[0] += 1
        with torch.no_grad():
            next(average.parameters()).lerp_(next(net.parameters()), 0.5)
        if broken[0]:
            raise RuntimeError("of the user's")

    def content() -> list[Any]:
        return [updates[0], *(param.tolist() for param in (*net.parameters(), *average.parameters()))]

    own.step = MethodType(step, own)  # type: ignore[method-assign]
    if under_a_scheduler:
        torch.optim.lr_scheduler.ConstantLR(own)
    device = opened()
    device.set_limit(2**30)
    try:
        trainer = trainer_of(lambda params: own, model=lambda: net)
        train(trainer, 2)
        before = content()
        forecast(trainer)
        assert content() == before
        broken[0] = True
        failure = trainer.run(Chunk(OWN, 1, 1)).failure
        assert content() == before
        assert failure is not None
        assert "of the user's" in failure.message
    finally:
        device.set_limit(None)
    assert "step was replaced by another function" in trainer.info().notes[-1]
    assert "what stands in place of its step" in save_objects({"own": own}, Path("/nowhere/at/all"), 2**40)


class Beside(torch.optim.SGD):
    """Keeps something in its state that is no weight's, from its first update on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["updates"] = self.state.get("updates", 0) + 1  # type: ignore[call-overload,index]
        super().step()


def test_state_that_is_no_weights_is_refused_once_it_is_there_and_stops_no_question() -> None:
    trainer = trainer_of(lambda params: Beside(params, lr=0.1))
    before = [param.detach().clone() for param in trainer.live.parameters]
    failure = trainer.run(Chunk(OWN, 1, 1)).failure
    assert failure is not None
    assert "Beside keeps a state that belongs to no weight ('updates')" in failure.message
    assert all(map(torch.equal, trainer.live.parameters, before))
    assert not trainer.live.optimizer.state
    vars(trainer.live.optimizer)["state"].update(mine=3)
    assert model_facts(trainer, inputs=False).groups == 1


def test_a_flip_away_from_an_optimizer_with_a_persons_own_value_in_its_state_says_so() -> None:
    trainer = trainer_of(None)
    train(trainer, 1, OWN.replace(optimizer="adam"))
    vars(trainer.live.optimizer)["state"].update(mine=3)
    failure = trainer.run(Chunk(OWN.replace(optimizer="sgd"), 2, 1)).failure
    assert failure is not None
    assert "Adam keeps a state that belongs to no weight ('mine')" in failure.message
    del vars(trainer.live.optimizer)["state"]["mine"]
    train(trainer, 1, OWN.replace(optimizer="sgd"), 3)


class Scaling(torch.optim.SGD):
    """Asks for the values of tensors, so that its update cannot be foreseen."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad * min(0.1, param.norm().item()))


def test_an_update_that_a_question_had_to_take_is_not_taken_for_what_forward_wrote() -> None:
    net = nn.Linear(4, 4)
    optimizer = Scaling(net.parameters(), lr=0.1)
    workload = Workload("scaling", lambda: net, few_rows, squares, optimizer=lambda params: optimizer)
    trainer = Trainer(workload, few(), opened(), time.time())
    settings = Settings(batch_size=2, optimizer="own", learning_rate=0.1)
    assert trainer.run(Chunk(settings, 1, 2)).failure is None
    held = net.weight.detach().clone()
    assert trainer.record() is not None
    assert trainer.stepper.not_foreseen
    assert torch.equal(net.weight, held)
    assert trainer.run(Chunk(settings, 1, 2)).failure is None


def sparse_table(build: Callable[[Iterable[Tensor]], Optimizer]) -> tuple[Tensor, Trainer]:
    table = nn.Embedding(4000, 64, sparse=True)
    rows = TensorDataset(torch.arange(4000), torch.zeros(4000, dtype=torch.long))
    data = ShardedStream(*as_dataset(rows), rank=0, size=1)
    workload = Workload("table", lambda: table, lambda: rows, squares_of, optimizer=build)
    return table.weight, Trainer(workload, data, opened(), time.time())


def test_the_update_of_a_sparse_table_is_predicted_as_it_is(alone: Overheard) -> None:
    weight, trainer = sparse_table(lambda params: torch.optim.Adagrad(params, lr=0.1))
    settings = Settings(batch_size=4000, optimizer="own", learning_rate=0.1)
    assert trainer.run(Chunk(settings, 1, 3)).failure is None
    held = weight.detach().clone()
    found = trainer.trials.forecast(settings, [4000], [4000], 0)
    assert "sparse" in found.update_undone
    assert torch.equal(weight, held)
    reply = trainer.run(Chunk(settings, 1, 2, ledger_steps=1))
    assert abs(found.of[0].live_peak_bytes - reply.samples[-1].live_peak_bytes) <= 64  # a few numbers


@pytest.mark.parametrize("ledger_steps", [0, 1])
def test_an_optimizer_that_keeps_sparse_state_is_refused_in_a_sentence(alone: Overheard, ledger_steps: int) -> None:
    weight, trainer = sparse_table(lambda params: torch.optim.SGD(params, lr=0.1))
    plain = Settings(batch_size=8, optimizer="own", learning_rate=0.1)
    assert trainer.run(Chunk(plain, 1, 2)).failure is None
    held, momentum = weight.detach().clone(), plain.replace(optimizer="momentum")
    failures = [
        trainer.trials.forecast(momentum, [8], [8], 0).failure,
        trainer.run(Chunk(momentum, 2, 2, ledger_steps=ledger_steps)).failure,
    ]
    assert all(one is not None and "SGD keeps a sparse momentum_buffer in its state" in one.message for one in failures)
    assert torch.equal(weight, held)
    assert trainer.run(Chunk(plain, 3, 2)).failure is None


def squares_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[0]).square().mean()  # type: ignore[no-any-return]
