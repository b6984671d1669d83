"""Gradients under checkpointing are those without, whatever blocks and cells write into what blocks keep."""

from __future__ import annotations

import itertools
import time
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine import cells
from gpumem_nb.engine.replay.checkpointing import Checkpointing
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.undo.changing import SMALL_BYTES
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_one_rank import loss, rows, stream

WIDTH = 4
LARGE = SMALL_BYTES // 4 + 1


class Block(nn.Module):
    """A checkpointed block that computes with what it keeps, and then changes that."""

    gain: Tensor
    large: Tensor

    def __init__(self, by_data: bool, every: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("gain", torch.ones(WIDTH))
        self.register_buffer("large", torch.ones(LARGE))
        self.stats = (torch.ones(WIDTH), torch.zeros(()))
        self.array = np.ones(1, dtype=np.float32)
        self.by_data, self.every, self.calls = by_data, every, 0

    def forward(self, x: Tensor) -> Tensor:
        mean, count = self.stats
        y = cast(Tensor, self.linear(x * self.gain.clone() * self.large[:WIDTH].clone() * mean.clone()))
        y = (y * float(self.array[0]) / (1 + count.clone())).tanh()
        self.calls += 1
        if self.calls % self.every == 0:
            with torch.no_grad():
                for tensor in (self.gain, self.large, mean):
                    (tensor.data if self.by_data else tensor).mul_(0.9)
                (count.data if self.by_data else count).add_(1)
                self.array *= 0.95
        return y


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("filled", ["by data", "in place", "bound anew"])
@pytest.mark.parametrize("by_data", [False, True])
def test_gradients_under_checkpointing_are_those_without_after_a_cell_wrote_what_blocks_keep(
    by_data: bool, filled: str
) -> None:
    def trained(checkpointing: str) -> list[Tensor]:
        torch.manual_seed(0)
        net: Any = nn.Sequential(Block(by_data), Block(by_data))
        trainer = Trainer(Workload("w", lambda: net, rows, loss), stream(), opened(), time.time())
        settings = Settings(batch_size=2, checkpointing=checkpointing)
        assert trainer.run(Chunk(settings, 1, 5)).failure is None
        for block in net:
            kept = (block.gain, block.large, block.stats[0])
            for tensor in kept:
                if filled != "bound anew":
                    (tensor.data if filled == "by data" else tensor).fill_(3.0)
            if filled == "bound anew":
                block.gain, block.large = torch.full_like(block.gain, 3.0), torch.full_like(block.large, 3.0)
        cells.one_more()
        assert trainer.run(Chunk(settings, 1, 2)).failure is None
        assert int(net[0].stats[1]) == 7
        return [param.detach().clone() for param in net.parameters()]

    assert all(map(torch.equal, trained("none"), trained("blocks")))


@pytest.mark.usefixtures("alone")
def test_a_large_tensor_that_a_block_writes_unseen_for_the_first_time_is_refused_or_right() -> None:
    def trained(checkpointing: str) -> list[Tensor]:
        torch.manual_seed(0)
        net: Any = nn.Sequential(Block(False, 3), Block(False, 3))
        trainer = Trainer(Workload("w", lambda: net, rows, loss), stream(), opened(), time.time())
        settings, done = Settings(batch_size=2, checkpointing=checkpointing), 0
        for id_ in range(9):
            reply = trainer.run(Chunk(settings, id_, 8 - done))
            done += sum(sample.done for sample in reply.samples)
            assert reply.failure is None or "left alone before" in reply.failure.message
        assert done == 8
        return [param.detach().clone() for param in net.parameters()]

    assert all(map(torch.equal, trained("none"), trained("blocks")))


class Counted(nn.Linear):
    """Counts how often it runs, in what no undo and no replay puts back."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        next(self.calls)
        return super().forward(x).tanh()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", ["blocks", "sqrt"])
def test_blocks_that_a_cell_puts_in_the_place_of_others_are_checkpointed_too(mode: str) -> None:
    def block() -> nn.Module:
        return nn.Sequential(Counted())

    trainer = Trainer(
        Workload("net", lambda: nn.Sequential(block(), block()), rows, loss), stream(), opened(), time.time()
    )
    chunk = Chunk(Settings(batch_size=2, checkpointing=mode), 1, 2)
    assert trainer.run(chunk).failure is None
    model = cast(nn.Sequential, trainer.live.model)
    for place in range(2):
        model[place] = block()
    trainer.live.optimizer.add_param_group({"params": list(model.parameters())})
    cells.one_more()
    counted = [one for one in model.modules() if isinstance(one, Counted)]
    assert trainer.run(chunk).failure is None  # whose first step the ranks begin again: they train other weights now
    before = [next(one.calls) for one in counted]
    assert trainer.run(chunk).failure is None
    assert [next(one.calls) - count - 1 for one, count in zip(counted, before, strict=True)] == [2 * 2] * 2


_CALLS = 8


class Late(nn.Linear):
    """Does the same for some calls and replays, and then something else in each, which no one can put back."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.numbers = itertools.chain(itertools.repeat(0, 2 * _CALLS), itertools.count())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + next(self.numbers))).tanh()


def test_what_a_block_does_otherwise_after_a_cell_is_refused() -> None:
    net = nn.Sequential(Late(), Late())
    checkpointing = Checkpointing(net, list(net), "blocks")
    for _ in range(_CALLS):
        loss(net, [torch.ones(4, WIDTH)]).backward()
    checkpointing.finished()
    cells.one_more()
    with pytest.raises(WorkloadError, match="run a second time it did something else"):
        loss(net, [torch.ones(4, WIDTH)]).backward()


class Decaying(nn.Linear):
    """Writes its weights by way of ``data``, which torch does not count, by so little that outputs hardly tell."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.999)
        return super().forward(x).tanh()


class DecayingAfter(nn.Linear):
    """Writes them by way of an array of NumPy's, once they were used."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        array = self.weight.detach().numpy()
        array *= 0.999
        return y


class Averaging(nn.Linear):
    """Keeps an average of its weights in frozen ones."""

    def __init__(self, features: int, results: int) -> None:
        super().__init__(features, results)
        self.average = nn.Linear(features, results).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.average.weight.data = 0.999 * self.average.weight.data + 0.001 * self.weight.data
        return super().forward(x).tanh() * cast(Tensor, self.average(x))


@pytest.mark.parametrize("kind", [Decaying, DecayingAfter, Averaging])
def test_a_block_that_writes_its_weights_unseen_is_refused(kind: type[nn.Linear]) -> None:
    net = nn.Sequential(kind(WIDTH, WIDTH), kind(WIDTH, WIDTH))
    checkpointing = Checkpointing(net, list(net), "blocks")
    with pytest.raises(WorkloadError, match=r"it changes its own weights in forward.*checkpointing=none"):
        loss(net, [torch.ones(4, WIDTH)]).backward()
    checkpointing.remove()
