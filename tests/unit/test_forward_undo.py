"""What a forward pass changes beside weights is put back when its step is undone: in modules, hooks and the loss."""

from __future__ import annotations

import copy
import functools
import random
import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpumem_nb.engine.attach import as_loss
from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.held_out import as_held_out
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.undo.changing import SMALL_BYTES
from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo, UpdateUndo
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.links import Overheard
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_one_rank import loss as mean_square
from tests.unit.test_one_rank import rows, stream, tried

WIDTH = 4
losses_seen = 0
log: list[float] = []


class Average:
    """An average of a model's weights, kept up to date by a hook."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.shadow = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.updates = 0

    def update(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.updates += 1
        with torch.no_grad():
            for name, param in module.named_parameters():
                self.shadow[name].mul_(0.9).add_(param, alpha=0.1)
            for average, param in zip(self.model.parameters(), module.parameters(), strict=True):
                average.lerp_(param, 0.1)


class Keeping(nn.Module):
    """Keeps state in every way that people do."""

    mean: Tensor
    shared = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0
        self.latest: Any = None
        self.fed = torch.zeros(WIDTH)
        self.recent: deque[float] = deque(maxlen=2)
        self.lists: dict[str, list[float]] = defaultdict(list)
        self.met: set[int] = set()
        self.meter = SimpleNamespace(total=0.0, inner=SimpleNamespace(peak=0.0))
        self.dropped: Any = "not yet"
        self.own, self.numbers = random.Random(1), np.random.default_rng(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        Keeping.shared += 1
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        self.fed += x.detach().abs().sum(0) + self.own.random() + self.numbers.random()
        y = cast(Tensor, self.norm(self.linear(x)))
        self.latest, value = y, float(y.detach().square().sum())
        self.recent.append(value)
        self.lists[f"calls of {self.calls}"].append(value)
        self.lists["all"].append(value)
        self.met.add(self.calls)
        self.meter.total += value
        self.meter.inner.peak = max(self.meter.inner.peak, value)
        if hasattr(self, "dropped"):
            del self.dropped
        self.made_in_forward = value
        return y


def model() -> tuple[nn.Module, Average, SimpleNamespace]:
    torch.manual_seed(0)
    net = nn.Sequential(Keeping(), Keeping())
    average, seen = Average(net), SimpleNamespace(calls=0, outputs=[])
    net.register_forward_hook(average.update)
    net[0].register_forward_hook(functools.partial(note, seen))
    calls = 0

    def count(module: nn.Module, inputs: Any) -> None:
        nonlocal calls
        calls += 1
        seen.closure = calls

    net[1].register_forward_pre_hook(count)
    net[1].register_full_backward_hook(lambda module, given, found: seen.outputs.append(calls))
    return net, average, seen


def note(seen: SimpleNamespace, module: nn.Module, inputs: Any, output: Tensor, found: list[int] = []) -> None:  # noqa: B006
    seen.calls += 1
    found.append(seen.calls)
    seen.default = list(found)


def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
    global losses_seen
    losses_seen += 1
    result = cast(Tensor, net(batch[0] + torch.randn(WIDTH) * random.random() * np.random.rand())).square().mean()
    log.append(result.item())
    return result


def everything(net: Any, average: Average, seen: SimpleNamespace) -> dict[str, Any]:
    """A copy of all that can be told."""
    state: dict[str, Any] = {"loss": (losses_seen, list(log)), "class": Keeping.shared}
    state["random"] = (torch.get_rng_state().tolist(), random.getstate(), tuple(np.random.get_state())[1:3])
    state["average"] = (
        average.updates,
        average.shadow,
        list(average.model.parameters()),
        list(average.model.buffers()),
    )
    state["seen"] = vars(seen)
    for number, module in enumerate(net):
        own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        del own["training"], own["own"], own["numbers"]
        drawn = (module.own.getstate(), module.numbers.bit_generator.state)
        state[f"module {number}"] = (own, dict(module.named_buffers()), drawn)
    return cast(dict[str, Any], _copied(state))


def _copied(value: Any) -> Any:
    """Plain values, to be compared."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, SimpleNamespace):
        return _copied(vars(value))
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_copied(item) for item in value]
    return copy.copy(value)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_everything_is_put_back(steps_before: int) -> None:
    net, average, seen = model()
    state = ForwardState([net], loss)
    batch = [torch.ones(3, WIDTH)]
    for _ in range(steps_before):
        ForwardUndo(state)
        loss(net, batch).backward()
        with torch.no_grad():
            for param in net.parameters():
                param.sub_(0.1)
    before = everything(net, average, seen)
    undo = ForwardUndo(state)
    for _ in range(2):
        loss(net, batch).backward()
    assert everything(net, average, seen) != before
    undo.undo()
    assert everything(net, average, seen) == before


@pytest.mark.usefixtures("alone")
def test_a_trial_leaves_no_trace_in_hooks() -> None:
    net, average, seen = model()
    trainer = Trainer(Workload("keeping", lambda: net, rows, loss), stream(), opened(), time.time())
    settings = Settings(batch_size=2)
    assert trainer.run(Chunk(settings, 1, 2)).failure is None
    before = everything(net, average, seen)
    assert tried(trainer, settings.replace(batch_size=4, checkpointing="blocks")) is None
    assert everything(net, average, seen) == before
    assert trainer.run(Chunk(settings, 1, 1)).failure is None
    assert average.updates == 3


def test_what_is_added_later_is_looked_after() -> None:
    net: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    state = ForwardState([net], loss)
    ForwardUndo(state)
    seen: list[int] = []
    counts = SimpleNamespace(calls=0)
    net[0].register_forward_hook(lambda *_: seen.append(1))
    net.append(Keeping())
    net[1].counts = counts
    net[1].register_forward_hook(lambda module, *_: setattr(module.counts, "calls", module.counts.calls + 1))
    undo = ForwardUndo(state)
    net(torch.ones(3, WIDTH))
    assert (seen, counts.calls, net[2].calls) == ([1], 1, 1)
    undo.undo()
    assert (seen, counts.calls, net[2].calls) == ([], 0, 0)


def test_buffers_of_all_kinds_are_put_back() -> None:
    net: Any = nn.Linear(2, 2)
    net.register_buffer("spread", torch.zeros(1).expand(4))
    net.register_buffer("sparse", torch.eye(3).to_sparse())
    net.register_buffer("empty", torch.zeros(0))
    net.register_buffer("brain", torch.ones(2, dtype=torch.bfloat16))
    undo = ForwardUndo(ForwardState([net], loss))
    net.brain.add_(1)
    net.sparse = net.sparse * 2
    undo.undo()
    assert net.brain.tolist() == [1, 1]
    assert torch.equal(net.sparse.to_dense(), torch.eye(3))


counted = 0


def test_what_an_attached_loss_counts_is_put_back() -> None:
    def annealed(net: Any, batch: Any) -> Any:
        global counted
        counted += 1
        return net(batch[0]).sum()

    class Counting(nn.Module):  # without any tensor
        seen = 0

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.seen += 1
            return (outputs - targets).sum()

    net, batch, criterion = nn.Linear(2, 2), [torch.ones(1, 2), torch.ones(1, 2)], Counting()
    for loss in (as_loss(annealed), as_loss(criterion)):
        loss(net, batch)
        before = counted, criterion.seen
        undo = ForwardUndo(ForwardState([net], loss))
        loss(net, batch)
        undo.undo()
        assert (counted, criterion.seen) == before


def test_an_optimizer_that_counts_in_an_attribute_is_put_back() -> None:
    class Counting(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.steps = 0
            self.state["mean"] = torch.zeros(1)  # type: ignore[index]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.steps += 1
            self.state["mean"].add_(1)  # type: ignore[index]

    net = nn.Linear(2, 2)
    optimizer = Counting(net.parameters())
    undo = UpdateUndo(net.parameters(), optimizer)
    optimizer.step()
    undo.undo()
    assert optimizer.steps == 0
    assert optimizer.state["mean"] == 0  # type: ignore[index]


class Late(nn.Module):
    """Writes something large in place, in every fourth forward or in all of them."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        large = torch.ones(20 * SMALL_BYTES // 4)
        self.large = large if what == "a tensor" else nn.Parameter(large, requires_grad=what == "a trained weight")
        self.calls, self.every, self.by_data = 0, 1 if what == "a tensor" else 4, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % self.every == 0:
            with torch.no_grad():
                (self.large.data if self.by_data else self.large).mul_(0.5)
        return cast(Tensor, self.linear(x)) * self.large[0]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", ["a tensor", "a frozen weight", "a trained weight"])
def test_what_is_large_and_first_written_in_a_step_that_is_undone_is_told_of_and_then_put_back(what: str) -> None:
    net = Late(what)
    optimizer = torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1)
    workload = Workload("late", lambda: net, rows, mean_square, optimizer=lambda params: optimizer)
    trainer = Trainer(workload, stream(), opened(), time.time())
    settings = Settings(batch_size=2, optimizer="own", learning_rate=0.1)
    if net.every > 1:
        assert trainer.run(Chunk(settings, 1, 3)).failure is None

    def changed() -> bool:
        before = net.large.detach().clone()
        assert trainer.trials.forecast(settings, [2], [2], 0).failure is None
        return not torch.equal(net.large, before)

    assert changed()
    told = trainer.run(Chunk(settings, 2, 1)).failure
    assert told is not None
    assert "forward wrote a large" in told.message
    assert not changed()
    assert not changed()
    assert trainer.run(Chunk(settings, 3, 4)).failure is None


def test_a_view_of_a_trained_weight_is_not_taken_for_something_that_forward_writes(
    alone: Overheard, monkeypatch: pytest.MonkeyPatch
) -> None:
    net: Any = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, WIDTH))
    net.view = net[0].weight.detach()[1:]
    wide = TensorDataset(torch.ones(16, 1024))
    workload = Workload("view", lambda: net, lambda: wide, mean_square)
    trainer = Trainer(workload, ShardedStream(*as_dataset(wide), rank=0, size=1), opened(), time.time())
    settings, before = Settings(batch_size=2), net.view.clone()
    with monkeypatch.context() as other_rank:
        other_rank.setattr(alone, "any_rank", lambda vote, about: True)  # which could not update
        assert trainer.run(Chunk(settings, 1, 1)).samples[0].event == "discarded"
    assert torch.equal(net.view, before)
    assert trainer.run(Chunk(settings, 2, 2)).failure is None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("by_data", [False, True])
def test_what_is_large_and_written_in_an_evaluation_is_told_of_once_and_then_put_back(by_data: bool) -> None:
    net = Late("a frozen weight")
    net.every, net.by_data = 1, by_data
    optimizer = torch.optim.SGD(net.linear.parameters(), lr=0.1)
    workload = Workload("late", lambda: net, rows, mean_square, optimizer=lambda params: optimizer)
    trainer = Trainer(workload, stream(), opened(), time.time(), as_held_out(rows()))
    settings = Settings(batch_size=64, optimizer="own", learning_rate=0.1)
    told = trainer.run(Chunk(settings, 1, 0, evaluate=True)).failure
    assert told is not None
    assert "from now on it is" in told.message
    before = net.large.detach().clone()
    for _ in range(2):
        assert trainer.run(Chunk(settings, 1, 0, evaluate=True)).evaluated
        assert torch.equal(net.large, before)


@pytest.mark.usefixtures("alone")
def test_a_large_tensor_that_was_made_in_inference_mode_is_put_back() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
            with torch.inference_mode():
                self.large = torch.ones(2**16)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 2:
                with torch.inference_mode():
                    self.large.mul_(0.5)
            return cast(Tensor, self.linear(x))

    net = Net()
    trainer = Trainer(Workload("net", lambda: net, rows, mean_square), stream(), opened(), time.time())
    settings = Settings(batch_size=2)
    assert trainer.run(Chunk(settings, 1, 2)).failure is None
    assert trainer.trials.forecast(settings, [2], [2], 0).failure is None
    assert (net.calls, net.large[0].item()) == (2, 1)


class Made(OrderedDict[str, Any]):
    """Gives a new object for each class that it holds, as Hugging Face's table of activations."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Squares(list[int]):
    def __iter__(self) -> Iterator[int]:
        return (number * number for number in range(3))


@pytest.mark.parametrize(("kept", "held"), [(Made(a=nn.ReLU), dict.values), (Squares([5]), list.copy)])
def test_of_containers_that_give_other_things_what_they_hold_is_put_back(kept: Any, held: Callable[[Any], Any]) -> None:
    net = nn.Linear(2, 2)
    cast(Any, net).kept = kept
    undo, before = ForwardUndo(ForwardState([net], loss)), list(held(kept))
    kept.update(b=nn.GELU) if isinstance(kept, dict) else kept.append(1)
    undo.undo()
    assert list(held(kept)) == before


def test_a_proxy_of_a_container_stops_no_step() -> None:
    made = Made(a=nn.ReLU)
    net = nn.Linear(2, 2)
    cast(Any, net).kept = weakref.proxy(made)
    ForwardUndo(ForwardState([net], loss)).undo()
