"""What is put back when a step is undone: only what differs, part by part, by content, in every kind of container."""

from __future__ import annotations

import time
import tracemalloc
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine import cells
from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.undo.changing import SMALL_BYTES
from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo, UpdateUndo
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_one_rank import loss, rows, stream, tried

WIDTH = 4
LARGE = SMALL_BYTES // 4 + 1


@dataclass(frozen=True, slots=True)
class Frozen:
    scale: float = 2.0


@dataclass(slots=True)
class Slotted:
    calls: int = 0
    seen: list[int] = field(default_factory=list)
    mean: Tensor = field(default_factory=lambda: torch.zeros(2))

    def count(self) -> None:
        self.calls += 1
        self.seen.append(1)
        self.mean.add_(1)


class Private:
    __slots__ = ("__hidden", "late")

    def __init__(self) -> None:
        self.__hidden = 0

    def count(self) -> int:
        self.__hidden += 1
        self.late = self.__hidden
        return self.__hidden


class Touchy:
    """Refuses to be set, whatever it is set to."""

    def __init__(self) -> None:
        vars(self)["value"] = 1

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("read only")


class Stats(NamedTuple):
    mean: Tensor
    number: Tensor


class Net(nn.Module):
    """Runs whatever it is given after its linear layer."""

    def __init__(self, change: Callable[[Any], None], **kept: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.change = change
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self)
        return cast(Tensor, self.linear(x))


def lock(array: Any) -> None:  # so that it cannot be put back
    array.setflags(write=True)
    array += 1
    array.setflags(write=False)


def call(net: Net) -> None:
    net(torch.ones(2, WIDTH))


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a slotted dataclass": (
        Slotted,
        lambda k: k.count(),
        lambda k: (k.calls, list(k.seen), k.mean.tolist()),
    ),
    "private slots, one of them empty": (
        Private,
        lambda k: k.count(),
        lambda k: (k._Private__hidden, hasattr(k, "late")),
    ),
    "a frozen dataclass that was changed all the same": (
        Frozen,
        lambda k: object.__setattr__(k, "scale", k.scale + 1),
        lambda k: k.scale,
    ),
    "tensors in a tuple": (
        lambda: (torch.zeros(2), torch.zeros(())),
        lambda k: k[1].add_(1),
        lambda k: [one.tolist() for one in k],
    ),
    "tensors in a named tuple in a dict": (
        lambda: {"all": Stats(torch.zeros(2), torch.zeros(()))},
        lambda k: k["all"].number.data.add_(1),
        lambda k: k["all"].number.item(),
    ),
    "a list in tuples": (
        lambda: ((1, [1, 2]),),
        lambda k: k[0][1].append(3),
        lambda k: list(k[0][1]),
    ),
    "a long list": (
        lambda: list(range(20_000)),
        lambda k: k.__setitem__(5, -1),
        lambda k: k[:10],
    ),
    "a long dict": (
        lambda: dict.fromkeys(range(20_000), 0),
        lambda k: [k.__setitem__(7, 1), k.pop(8, None)],
        lambda k: (k[7], len(k), list(k)[:10]),
    ),
    "tensors in a long list": (
        lambda: [torch.zeros(1) for _ in range(12_000)],
        lambda k: k[11_000].add_(1),
        lambda k: k[11_000].item(),
    ),
    "containers in containers": (
        lambda: {"a": {"b": [{"c": [torch.zeros(1)]}]}},
        lambda k: k["a"]["b"][0]["c"][0].add_(1),
        lambda k: k["a"]["b"][0]["c"][0].item(),
    ),
    "an array": (lambda: np.zeros(3), lambda k: k.__setitem__(1, 5.0), lambda k: k.tolist()),
    "a UserDict": (UserDict, lambda k: k.__setitem__("n", 1), lambda k: dict(k)),
    "a small tensor by way of data": (lambda: torch.zeros(3), lambda k: k.data.fill_(7), lambda k: k.tolist()),
    "a small tensor late": (
        lambda: torch.zeros(3),
        lambda k: k.data.add_(len(LATE)),
        lambda k: k.tolist(),
    ),
    "a large tensor": (lambda: torch.zeros(LARGE), lambda k: k.data.fill_(7), lambda k: k.sum().item()),
    "a frozen weight": (
        lambda: nn.Parameter(torch.zeros(3), requires_grad=False),
        lambda k: setattr(k, "data", 0.9 * k.data + 1),
        lambda k: k.tolist(),
    ),
}
LATE: list[int] = []


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_in_any_way_is_put_back(kind: str) -> None:
    make, change, told = KEPT[kind]
    net = Net(lambda net: change(net.kept), kept=make())
    state = ForwardState([net], loss)
    changed = False
    for step in range(3):
        LATE[:] = [1] * (step == 2)  # from a step on before which nothing was seen to change
        before = told(net.kept)
        undo = ForwardUndo(state)
        call(net)
        changed |= told(net.kept) != before
        undo.undo()
        assert told(net.kept) == before
        call(net)
    assert changed


def test_a_large_tensor_written_by_way_of_data_is_put_back_after_each_of_several_undone_steps() -> None:
    net: Any = Net(lambda net: net.kept.data.add_(1), kept=torch.zeros(LARGE))
    state = ForwardState([net], loss)
    for _ in range(3):
        undo = ForwardUndo(state)
        call(net)
        undo.undo()
        assert net.kept.sum() == 0


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_a_container_that_is_bound_anew_between_steps_is_put_back(steps_before: int) -> None:
    net: Any = Net(lambda net: net.kept["all"].append(1), kept={"all": []})
    state = ForwardState([net], loss)
    for _ in range(steps_before):
        ForwardUndo(state)
        call(net)
    net.kept = {"all": []}
    undo = ForwardUndo(state)
    call(net)
    assert net.kept == {"all": [1]}
    undo.undo()
    assert net.kept == {"all": []}


def test_what_did_not_change_is_not_touched_and_what_raises_stops_nothing_else() -> None:
    def change(net: Any) -> None:
        net.calls += 1
        lock(net.array)
        net.last += 1

    net: Any = Net(change, config=Frozen(), touchy=Touchy(), calls=0, array=np.zeros(1), last=0)
    net.norm = nn.BatchNorm1d(WIDTH)
    undo = ForwardUndo(ForwardState([net], loss))
    random = torch.get_rng_state()
    call(net)
    net.norm(torch.randn(3, WIDTH))
    with pytest.raises(ValueError, match="read-only"):
        undo.undo()
    assert (net.calls, net.last, net.norm.running_mean.tolist()) == (0, 0, [0.0] * WIDTH)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.usefixtures("alone")
def test_a_step_that_could_not_be_put_back_as_a_whole_is_told_of_and_leaves_the_weights() -> None:
    def change(net: Any) -> None:
        lock(cast(Any, net).array)

    net = Net(change, array=np.zeros(1))
    trainer = Trainer(Workload("locking", lambda: net, rows, loss), stream(), opened(), time.time())
    settings = Settings(batch_size=2)
    before = [param.detach().clone() for param in net.parameters()]
    assert tried(trainer, settings.replace(batch_size=4)) is None
    assert all(map(torch.equal, net.parameters(), before))
    reply = trainer.run(Chunk(settings, 2, 1))
    assert reply.failure is not None
    assert "could not all be put back" in reply.failure.message
    assert "read-only" in reply.failure.message
    assert trainer.run(Chunk(settings, 3, 1)).failure is None


@pytest.mark.usefixtures("alone")
def test_a_trained_weight_that_forward_writes_is_put_back_when_the_update_fails() -> None:
    def change(net: Any) -> None:
        net.linear.weight.data.clamp_(-0.1, 0.1)

    net = Net(change)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    workload = Workload("clamping", lambda: net, rows, loss, optimizer=lambda params: optimizer)
    trainer = Trainer(workload, stream(), opened(), time.time())
    settings = Settings(batch_size=2, optimizer="own", learning_rate=0.01)
    assert trainer.run(Chunk(settings, 1, 3)).failure is None
    for id_ in (2, 3):  # once as the first step after a cell, once later
        before = [param.detach().clone() for param in net.parameters()]
        counts = [state["step"].item() for state in optimizer.state.values()]
        optimizer.param_groups[0]["betas"] = (0.9, None)
        cells.one_more()
        assert trainer.run(Chunk(settings, id_, 1)).failure is not None
        assert all(map(torch.equal, net.parameters(), before))
        assert [state["step"].item() for state in optimizer.state.values()] == counts
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        cells.one_more()
        assert trainer.run(Chunk(settings, id_ + 10, 2)).failure is None


def test_what_an_optimizer_keeps_in_any_place_is_put_back() -> None:
    class Own(torch.optim.Optimizer):
        updates = 0

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "seen": torch.zeros(1)})
            self.mean, self.history, self.steps = torch.zeros(1), [torch.zeros(1)], 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.steps += 1
            self.latest = Own.updates = Own.updates + 1
            self.mean.add_(1)
            self.history.append(torch.ones(1))
            self.history[0].add_(1)
            for group in self.param_groups:
                group["seen"].add_(1)
                for param in group["params"]:
                    self.state[param].setdefault("past", [torch.zeros(1)])[0].add_(1)

    net = nn.Linear(2, 2)
    optimizer = Own(net.parameters())
    optimizer.step()

    del optimizer.latest

    def told() -> Any:
        return (
            set(vars(optimizer)),
            Own.updates,
            optimizer.steps,
            optimizer.mean.item(),
            [one.item() for one in optimizer.history],
            optimizer.param_groups[0]["seen"].item(),
            [state["past"][0].item() for state in optimizer.state.values()],
        )

    before = told()
    undo = UpdateUndo(net.parameters(), optimizer)
    optimizer.step()
    assert told() != before
    undo.undo()
    assert told() == before


def test_memory_stays_flat_where_a_new_dict_is_made_in_every_step() -> None:
    def change(net: Any) -> None:
        net.latest = {"features": torch.zeros(2**14), "large": torch.zeros(2**16)}

    net = Net(change)
    state = ForwardState([net], loss)

    def take(steps: int) -> int:
        for _ in range(steps):
            ForwardUndo(state)
            call(net)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()  # which counts NumPy's memory too
    try:
        before = take(50)
        assert take(200) - before < 2**17
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("alone")
def test_rows_that_a_cell_adds_to_the_data_are_told_of() -> None:
    data = [(torch.ones(WIDTH),) for _ in range(16)]
    trainer = Trainer(
        Workload("w", lambda: nn.Linear(WIDTH, 1), lambda: data, loss),
        ShardedStream(*as_dataset(data), rank=0, size=1),
        opened(),
        time.time(),
    )
    settings = Settings(batch_size=2)
    assert trainer.run(Chunk(settings, 1, 1)).failure is None
    data.append((torch.ones(WIDTH),))
    cells.one_more()
    for id_ in (2, 3):
        reply = trainer.run(Chunk(settings, id_, 1))
        assert reply.failure is not None
        assert "The data has 17 samples now and had 16 when it was attached" in reply.failure.message
    data.pop()
    assert trainer.run(Chunk(settings, 4, 1)).failure is None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("before", ["a question", "a step after a cell", "a later step"])
def test_a_large_weight_that_forward_writes_is_put_back_or_told_of(before: str) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.table = nn.Parameter(torch.ones(20 * LARGE), requires_grad=False)
            self.wrong = False

        def forward(self, x: Tensor) -> Tensor:
            self.table.data.mul_(0.5)
            if self.wrong:
                raise ValueError("wrong")
            return cast(Tensor, self.linear(x)) * self.table[0]

    net = Large()
    optimizer = torch.optim.SGD(net.linear.parameters(), lr=0.1)
    workload = Workload("large", lambda: net, rows, loss, optimizer=lambda params: optimizer)
    trainer = Trainer(workload, stream(), opened(), time.time())
    settings = Settings(batch_size=2, optimizer="own", learning_rate=0.1)
    if before != "a question":
        assert trainer.run(Chunk(settings, 1, 2)).failure is None
    if before == "a step after a cell":
        cells.one_more()
    held = net.table.detach().clone()
    net.wrong = True
    if before == "a question":
        assert tried(trainer, settings.replace(batch_size=4)) is not None
    else:
        assert trainer.run(Chunk(settings.replace(batch_size=4), 2, 1)).failure is not None
    net.wrong = False
    if torch.equal(net.table, held):
        assert before == "a later step"
    else:
        told = trainer.run(Chunk(settings, 3, 1)).failure
        assert told is not None
        assert "wrote a large weight" in told.message
    assert trainer.run(Chunk(settings, 4, 1)).failure is None
