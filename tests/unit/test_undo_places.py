"""What a step that is undone puts back, by where it lies: in classes, objects, functions, optimizers, other weights."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import ChainMap, UserList
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from gpumem_nb.engine import cells
from gpumem_nb.engine.copies import host_copy
from gpumem_nb.engine.data.held_out import as_held_out
from gpumem_nb.engine.step.ballot import NUMBERS
from gpumem_nb.engine.step.buckets import ReductionConfig
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.step.voting import StepOrder
from gpumem_nb.engine.undo import step_undo
from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo, UpdateUndo
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard
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


class Lines(list[int]):
    """A container of the user's own, with attributes."""

    total = 0


@pytest.mark.parametrize("kept", [Lines(), Namespace(total=0), ChainMap({"total": 0}), UserList([1])])
def test_attributes_of_containers_and_namespaces_are_put_back(kept: Any) -> None:
    net, held = nn.Linear(WIDTH, WIDTH), kept if isinstance(kept, ChainMap) else vars(kept)
    cast(Any, net).kept = kept
    cast(Any, net).ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    state = ForwardState([net], loss)
    for total in (1, 2):
        undo = ForwardUndo(state)
        held["total"] = total
        undo.undo()
        assert held.get("total", 0) == 0


class Program:
    """Stands for its own variables, as in a notebook."""

    calls = 0


helpers: Any = ModuleType("helpers_of_a_notebook")
exec("calls = 0\ndef count():\n    global calls\n    calls += 1", vars(helpers))


class Meter:
    def __init__(self) -> None:
        self.calls = 0


class Everywhere(nn.Module):
    """Counts where a class, a class of variables, a module and the functions in its own ones keep something."""

    meter, array = Meter(), np.zeros(1)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.program = Program
        self.table = np.zeros(2)
        self.table.setflags(write=False)

    @staticmethod
    def far() -> None:
        SEEN["x"].append(1)

    @property
    def scale(self) -> int:
        SEEN["y"].append(1)
        return 1

    def forward(self, x: Tensor) -> Tensor:
        self.meter.calls += 1
        self.array += 1
        Program.calls += 1
        helpers.count()
        self.far()
        assert [SEEN["z"].__iadd__([number]) for number in range(2)]
        return cast(Tensor, self.linear(x)) * self.scale


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(x)


def test_what_the_class_of_a_parametrized_module_keeps_is_put_back() -> None:
    net = parametrizations.weight_norm(Counted(WIDTH, WIDTH))
    undo = ForwardUndo(ForwardState([net], loss))
    net(torch.ones(2, WIDTH))
    undo.undo()
    assert Counted.calls == 0


def test_what_classes_their_functions_and_modules_of_ones_own_keep_is_put_back() -> None:
    net, lists = Everywhere(), ("x", "y", "z")
    SEEN.update({name: [] for name in lists})

    def told() -> list[Any]:
        lengths = [len(SEEN[name]) for name in lists]
        return [net.meter.calls, int(net.array[0]), Program.calls, helpers.calls, *lengths]

    state = ForwardState([net], loss)
    for _ in range(2):
        before = told()
        undo = ForwardUndo(state)
        net(torch.ones(2, WIDTH))
        assert all(now > then for now, then in zip(told(), before, strict=True))
        undo.undo()
        assert told() == before
        net(torch.ones(2, WIDTH))


class Marked(Tensor):
    """A tensor by another name."""


def inferred() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@torch.inference_mode()
def fill_inferred(net: Any) -> None:
    net.kept.add_(1)


TENSORS: dict[str, tuple[Callable[[], Tensor], Callable[[Any], Any]]] = {
    "of a class of one's own": (lambda: torch.zeros(3).as_subclass(Marked), lambda net: net.kept.add_(1)),
    "of inference mode": (inferred, fill_inferred),
    "that grows": (
        lambda: torch.zeros(3),
        lambda net: setattr(net.kept, "data", torch.ones(len(net.kept) + 1)),
    ),
    "that is resized": (lambda: torch.zeros(3), lambda net: net.kept.resize_(len(net.kept) + 1).fill_(1)),
    "of another type": (lambda: torch.zeros(3), lambda net: setattr(net.kept, "data", net.kept.data.double() + 1)),
}


@pytest.mark.parametrize("as_buffer", [False, True], ids=["an attribute", "a buffer"])
@pytest.mark.parametrize("what", TENSORS)
def test_a_tensor_is_put_back(what: str, as_buffer: bool) -> None:
    make, change = TENSORS[what]

    class Keeping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                change(self)
            return super().forward(x)

    net: Any = Keeping(WIDTH, WIDTH)
    if as_buffer:
        net.register_buffer("kept", make())
    else:
        net.kept = make()
    state = ForwardState([net], loss)
    for _ in range(2):
        before, kind = net.kept.tolist(), net.kept.dtype
        undo = ForwardUndo(state)
        net(torch.ones(2, WIDTH))
        assert net.kept.tolist() != before
        undo.undo()
        assert (net.kept.tolist(), net.kept.dtype) == (before, kind)


def test_what_forward_froze_before_it_failed_is_trained_again() -> None:
    net = nn.Linear(WIDTH, WIDTH)
    undo = ForwardUndo(ForwardState([net], loss))
    net.weight.requires_grad_(False)
    undo.undo()
    assert net.weight.requires_grad


def test_modules_and_weights_that_forward_makes_are_gone_when_it_is_undone() -> None:
    class Making(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "late"):
                self.late, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(1))
            return cast(Tensor, self.late(super().forward(x))) * self.gain

    net = Making(WIDTH, WIDTH)
    undo = ForwardUndo(ForwardState([net], loss))
    first = net(torch.ones(2, WIDTH))
    undo.undo()
    assert [name for name, _ in net.named_parameters()] == ["weight", "bias"]
    assert torch.equal(net(torch.ones(2, WIDTH)), first)


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


def test_a_view_that_an_update_replaces_is_put_back_as_a_view() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.all = torch.zeros(4)
            self.half = self.all[:2]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.half = self.half + 1

    net = nn.Linear(2, 2)
    optimizer = Own(net.parameters())
    undo = UpdateUndo(net.parameters(), optimizer)
    optimizer.step()
    undo.undo()
    optimizer.all.fill_(3)
    assert optimizer.half.tolist() == [3, 3]


@pytest.mark.usefixtures("alone")
def test_a_frozen_weight_that_the_optimizer_holds_is_not_copied_and_needs_no_room_for_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300), nn.Linear(300, 2))
    net[1].requires_grad_(False)
    copied = set[int]()

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        copied.add(id(tensor))
        return host_copy(tensor)

    monkeypatch.setattr(step_undo, "host_copy", noted)
    workload = Workload("net", lambda: net, rows, loss, optimizer=lambda params: torch.optim.AdamW(net.parameters()))
    device, held_out = opened(), as_held_out(TensorDataset(torch.ones(4, 4)))
    trainer = Trainer(workload, stream(), device, time.time(), held_out)
    settings = Settings(batch_size=2, optimizer="own", learning_rate=0.001)
    reply = trainer.run(Chunk(settings, 1, 1, evaluate=True))
    assert (reply.failure, reply.evaluated is None) == (None, False)
    assert id(net[0].weight) in copied
    assert id(net[1].weight) not in copied
    order = StepOrder(1, False, 0, True, False, ReductionConfig.under(settings))
    monkeypatch.setattr(device, "room", lambda: 3 * 300 * 300)  # less than once the frozen one
    assert not trainer.stepper.voting.update_may_fail(order)


def test_a_weight_that_is_frozen_on_one_rank_alone_is_put_back_after_an_update_that_failed(alone: Overheard) -> None:
    net: Any = nn.Module()
    net.large, net.small, net.table = nn.Linear(4, 100_000), nn.Linear(4, 4), nn.Embedding(2, 4, sparse=True)

    def own(params: Any) -> torch.optim.Optimizer:
        groups = [net.large.parameters(), net.small.parameters(), net.table.parameters()]
        return torch.optim.AdamW([{"params": group} for group in groups])

    def some(model: Any, batch: list[Tensor]) -> Tensor:
        second = net.large if net.large.weight.requires_grad else net.table
        x = batch[0] if second is net.large else torch.zeros(1, dtype=torch.long)
        return cast(Tensor, net.small(batch[0]).square().mean() + second(x).square().mean())

    def trained_elsewhere(name: str, tensors: Any) -> None:
        for tensor in tensors:
            if len(tensor) == NUMBERS + 1 + 5:
                tensor[NUMBERS + 1] = 1  # it has a gradient elsewhere

    settings = Settings(batch_size=2, optimizer="own", learning_rate=0.001)
    trainer = Trainer(Workload("net", lambda: net, rows, some, optimizer=own), stream(), opened(), time.time())
    assert trainer.run(Chunk(settings, 1, 1)).failure is None
    net.large.weight.requires_grad_(False)
    cells.one_more()
    alone.on_send = trained_elsewhere
    before = net.large.weight.clone()
    reply = trainer.run(Chunk(settings, 1, 1))
    assert reply.failure is not None
    assert "sparse gradients" in reply.failure.message
    assert torch.equal(net.large.weight, before)
