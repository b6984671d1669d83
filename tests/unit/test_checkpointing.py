"""Checkpointing from outside: same numbers, fewer saved tensors, nothing left behind."""

from __future__ import annotations

import copy
import pickle
import random
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gpumem_nb.engine.replay.checkpointing import SEGMENT_BLOCKS, Checkpointing, find_blocks
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.undo import python_state
from gpumem_nb.engine.undo.reachable import Reachable
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_one_rank import loss, rows, stream

MODES = tuple(mode for mode in SEGMENT_BLOCKS if mode != "selective")  # which has tests of its own


class Block(nn.Module):
    """Keyword arguments, a tuple result, dropout, and a batch norm: what a replay can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.inner(x) * scale
        return y, y.sum()


@dataclass(frozen=True)
class Frozen:
    use_cache: bool = True


class Stack(nn.Module):
    def __init__(self, depth: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x, extra = self.first(x), x.new_zeros(())
        for index, block in enumerate(self.blocks):
            x, total = block(x, scale=self.scale)
            extra = extra + total
            if index == 3:
                x = x + 0.1  # the model's own code between two blocks of a segment
        return x.square().mean() + extra * 1e-3


def gradients(model: nn.Module, precision: torch.dtype | None = None) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(3)
    model.zero_grad()
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
        loss = model(x)
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_and_statistics_are_bit_identical(mode: str, precision: torch.dtype | None) -> None:
    torch.manual_seed(0)
    plain, wrapped = Stack(), Stack()
    wrapped.load_state_dict(plain.state_dict())
    checkpointing = Checkpointing(wrapped, find_blocks(wrapped), mode)
    for _ in range(2):
        expected_gradients, expected_buffers = gradients(plain, precision)
        found_gradients, found_buffers = gradients(wrapped, precision)
        assert len(found_gradients) == len(expected_gradients)
        assert all(torch.equal(a, b) for a, b in zip(expected_gradients, found_gradients, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(expected_buffers, found_buffers, strict=True))
    checkpointing.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in wrapped.modules())


@pytest.mark.parametrize("mode", MODES)
def test_blocks_save_nothing_and_let_go_of_everything(mode: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(9)))
    Checkpointing(model, find_blocks(model), mode)
    x = torch.randn(4, 8)
    saved: list[Tensor] = []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(remember, lambda tensor: tensor):
        loss = model(x).sum()
    # Only the sum outside the blocks may save, and it saves nothing.
    assert saved == []
    reference = weakref.ref(x)
    loss.backward()
    del x, loss
    assert reference() is None, "a segment outlived its graph"


def test_an_exception_in_a_block_leaves_no_hook_open() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8))
            self.angry = False

        def forward(self, x: Tensor) -> Tensor:
            if self.angry:
                raise RuntimeError("no")
            return cast(Tensor, self.inner(x))

    second = Moody()
    model = nn.Sequential(Moody(), second)
    Checkpointing(model, find_blocks(model), "blocks")
    second.angry = True
    with pytest.raises(RuntimeError, match="no"):
        model(torch.randn(2, 8))
    second.angry = False
    held = torch.randn(2, 8, requires_grad=True)
    held.square().sum().backward()
    assert torch.equal(held.grad, 2 * held)  # type: ignore[arg-type]
    model(torch.randn(2, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_input_changed_in_place_is_refused_not_miscomputed() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = self.blocks[0](x)
            x.mul_(2)
            return cast(Tensor, self.blocks[1](y).sum())

    model = Changing()
    Checkpointing(model, find_blocks(model), "blocks")
    with pytest.raises(WorkloadError, match="changed in place"):
        model(torch.randn(2, 8)).backward()


def test_without_gradients_nothing_is_recorded() -> None:
    model = Stack()
    Checkpointing(model, find_blocks(model), "blocks")
    with torch.no_grad():
        model.eval()(torch.randn(4, 8))
    model.train()
    gradients(model)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (Stack(5), 5),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), 3),
        (nn.ModuleDict({"stages": nn.ModuleList(nn.Sequential(*(Block() for _ in range(3))) for _ in range(2))}), 2),
        (nn.Linear(2, 2), 0),
    ],
)
def test_blocks_are_found(model: nn.Module, count: int) -> None:
    assert len(find_blocks(model)) == count


def test_a_model_without_parts_is_refused() -> None:
    with pytest.raises(WorkloadError, match="checkpointing=none"):
        Checkpointing(nn.Linear(2, 2), [], "blocks")


def test_generation_cache_is_off_only_while_checkpointing() -> None:
    class Config:
        use_cache = True

    model: Any = Stack()
    model.config = Config()
    checkpointing = Checkpointing(model, find_blocks(model), "sqrt")
    assert model.config.use_cache is False
    checkpointing.remove()
    assert model.config.use_cache is True


def test_a_configuration_that_cannot_be_changed_is_left_alone() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))
    model.config = Frozen()  # type: ignore[assignment]
    checkpointing = Checkpointing(model, find_blocks(model), "blocks")
    model(torch.randn(4, 8)).sum().backward()
    checkpointing.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.usefixtures("alone")
def test_what_blocks_keep_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Reachable] = []

    def counted(roots: Iterable[Any]) -> Reachable:
        looked.append(Reachable(roots))
        return looked[-1]

    monkeypatch.setattr(python_state, "Reachable", counted)

    def network() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(9)))

    trainer = Trainer(Workload("blocks", network, rows, loss), stream(), opened(), time.time())
    settings = Settings(batch_size=2, checkpointing="blocks")
    assert trainer.run(Chunk(settings, 1, 2)).failure is None
    looked.clear()
    assert trainer.run(Chunk(settings, 1, 3)).failure is None
    assert len(looked) < 9, "hooks that are put on in each step are the same hooks"


def test_an_interrupted_forward_leaves_no_hooks_behind() -> None:
    class Stopped(nn.Module):
        stop = True

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if Stopped.stop:
                raise KeyboardInterrupt
            return cast(Tensor, self.linear(x).tanh())

    model = nn.Sequential(Stopped(), Stopped())
    checkpointing = Checkpointing(model, list(model), "blocks")
    x = torch.randn(4, 8)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    checkpointing.abandon()
    Stopped.stop = False
    model(x).sum().backward()
    checkpointed = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    checkpointing.remove()
    model.zero_grad()
    model(x).sum().backward()
    for param, gradient in zip(model.parameters(), checkpointed, strict=True):
        assert torch.equal(param.grad, gradient)  # type: ignore[arg-type]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deep": copy.deepcopy,
    "pickled": lambda model: cast(nn.Module, pickle.loads(pickle.dumps(model))),
    "cloudpickled": lambda model: cast(nn.Module, pickle.loads(cloudpickle.dumps(model))),
    "averaged": lambda model: torch.optim.swa_utils.AveragedModel(model),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_while_checkpointing_is_on_is_a_plain_model(how: str) -> None:
    model = Stack()
    expected = gradients(model)[0]
    checkpointing = Checkpointing(model, find_blocks(model), "sqrt")
    twin = COPIES[how](model)
    assert_all_equal(gradients(twin)[0], expected)
    assert_all_equal(gradients(model)[0], expected)
    checkpointing.remove()
    assert_all_equal(gradients(COPIES[how](twin))[0], expected)


def test_a_shallow_copy_of_a_block_is_not_checkpointed() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    Checkpointing(model, find_blocks(model), "blocks")
    x = torch.randn(4, 8)
    expected = torch.autograd.grad(model[0](x).sum(), list(model[0].parameters()))
    block = copy.copy(model[0])
    model(x)  # of which no backward asks for anything
    assert_all_equal(torch.autograd.grad(block(x).sum(), list(block.parameters())), expected)


def test_a_graph_that_was_made_before_is_run_backward_afterwards() -> None:
    model = Stack()
    expected = gradients(model)[0]
    model.zero_grad()
    checkpointing = Checkpointing(model, find_blocks(model), "sqrt")
    torch.manual_seed(3)
    loss = model(torch.randn(16, 8))
    checkpointing.take_off()
    loss.backward()
    assert_all_equal([param.grad for param in model.parameters() if param.grad is not None], expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def assert_all_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_what_blocks_count_is_told_also_where_they_bind_containers_anew() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls, self.latest = nn.Linear(4, 4), 0, {"features": [0]}

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.latest = {"features": [0]}
            return cast(Tensor, self.linear(x)).tanh()

    model = nn.Sequential(Counting(), Counting())
    checkpointing = Checkpointing(model, list(model), "blocks")
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert "calls" in (checkpointing.changed or [])


@pytest.mark.parametrize(
    "drawn", ["random.random()", "np.random.rand()", "float(torch.rand([], generator=own))", "1.0"]
)
def test_random_numbers_that_torch_does_not_put_back_are_told(drawn: str) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.own = nn.Linear(4, 4), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            names = {"random": random, "np": np, "torch": torch, "own": self.own}
            return cast(Tensor, self.linear(x).tanh() * eval(drawn, names))

    model = nn.Sequential(Noisy(), Noisy())
    checkpointing = Checkpointing(model, list(model), "blocks")
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert bool(checkpointing.changed) is (drawn != "1.0")


def test_blocks_that_keep_arrays_of_objects_and_numbers_that_are_none_change_nothing() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.best = nn.Linear(4, 4), float("nan")
            self.unset, self.pieces = np.full(2, np.nan), np.array([torch.ones(3), None], dtype=object)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.linear(x)).tanh()

    model = nn.Sequential(Keeping(), Keeping())
    checkpointing = Checkpointing(model, list(model), "blocks")
    model(torch.ones(2, 4)).sum().backward()
    assert checkpointing.changed == []
