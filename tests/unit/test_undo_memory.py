"""Memory that forward or a metric puts in place of that of weights is not theirs any more when that is undone."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpumem_nb.engine.data.held_out import as_held_out
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.engine.undo.changing import SMALL_BYTES
from gpumem_nb.engine.undo.step_undo import ForwardState, ForwardUndo, KeptWeights
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_one_rank import loss, rows, stream

WIDTH = 4
LARGE = int((SMALL_BYTES // 4) ** 0.5) + 1


def given(net: nn.Linear, other: dict[str, Tensor]) -> None:
    for name, param in net.named_parameters():
        param.data = other[name]


def swapped(net: nn.Linear, other: dict[str, Tensor]) -> None:
    for name, param in net.named_parameters():
        param.data, other[name].data = other[name].data, param.data


def halved(net: nn.Linear, other: dict[str, Tensor]) -> None:
    for param in net.parameters():
        param.data = param.data.half()


def turned(net: nn.Linear, other: dict[str, Tensor]) -> None:
    net.weight.data = net.weight.data.t().clone()  # of other strides


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("width", [WIDTH, LARGE])
@pytest.mark.parametrize("change", [given, swapped, halved, turned])
def test_a_weight_that_was_given_other_memory_gets_back_its_own(
    change: Callable[[nn.Linear, dict[str, Tensor]], None], width: int, copied: bool
) -> None:
    net = nn.Linear(width, width)
    other = {name: param.data + 1 for name, param in net.named_parameters()}
    state = ForwardState([net], lambda: other)
    tensors = [*net.parameters(), *other.values()]
    for _ in range(2):
        then = [tensor.detach().clone() for tensor in tensors]
        kept = KeptWeights.before_forward(net.parameters(), net.parameters(), copy=copied)
        undo = ForwardUndo(state, kept)
        change(net, other)
        undo.undo()
        assert all(map(torch.equal, tensors, then))
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def test_memory_of_weights_that_move_in_each_step_is_held_in_the_first_one_alone() -> None:
    net = nn.Linear(WIDTH, WIDTH, bias=False)
    state, kept = ForwardState([net], loss), KeptWeights([])
    for held in (True, False, False):
        array = np.ones((WIDTH, WIDTH), np.float32)
        net.weight.data, lives = torch.from_numpy(array), weakref.ref(array)
        del array
        undo = ForwardUndo(state, kept)
        net.weight.data = net.weight.data * 2
        assert (lives() is not None) == held
        undo.watch_no_more()
        del undo


class Average:
    """The average of weights that many take for an evaluation, as tutorials have it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.backup = model, dict[str, Tensor]()
        self.shadow = {name: param.data.clone() + 1 for name, param in model.named_parameters()}

    def apply(self) -> None:
        for name, param in self.model.named_parameters():
            self.backup[name], param.data = param.data, self.shadow[name]

    def restore(self) -> None:
        for name, param in self.model.named_parameters():
            param.data = self.backup[name]
        self.backup.clear()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("before", [0, 1])
def test_an_evaluation_that_fails_under_averaged_weights_leaves_both(before: int) -> None:
    net = nn.Linear(WIDTH, LARGE**2 // WIDTH)
    average, broken = Average(net), [False] * before + [True]

    def metric(model: nn.Module, batch: Any) -> float:
        average.apply()
        if broken.pop(0):
            raise ValueError("of the metric")
        average.restore()
        return 1.0

    held_out = as_held_out(TensorDataset(torch.ones(2, WIDTH)))
    workload = Workload("averaged", lambda: net, rows, loss, metric=metric)
    trainer = Trainer(workload, stream(), opened(), time.time(), held_out)
    settings = Settings(batch_size=2)
    assert trainer.run(Chunk(settings, 1, 2)).failure is None
    tensors = [*net.parameters(), *average.shadow.values()]
    then = [tensor.detach().clone() for tensor in tensors]
    replies = [trainer.run(Chunk(settings, 1, 0, evaluate=True)) for _ in range(before + 1)]
    assert [reply.failure is None for reply in replies] == [True] * before + [False]
    assert all(map(torch.equal, tensors, then))
    assert trainer.run(Chunk(settings, 1, 1)).failure is None
    assert all(map(torch.equal, tensors[2:], then[2:])), "the average is not trained"


@pytest.mark.parametrize("part", [slice(None), slice(None, None, 2)], ids=["whole", "every second column"])
def test_a_large_array_of_numpys_that_forward_writes_is_put_back(part: slice) -> None:
    class Averaging(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.averages = [np.zeros((WIDTH, SMALL_BYTES // 8))[:, part]]

        def forward(self, x: Tensor) -> Tensor:
            self.averages[0][-1] += 1
            return super().forward(x)

    net = Averaging()
    state = ForwardState([net], loss)
    for steps in range(3):
        undo = ForwardUndo(state)
        net(torch.ones(2, WIDTH))
        undo.undo()
        assert net.averages[0][-1].max() == net.averages[0][-1].min() == steps
        net(torch.ones(2, WIDTH))
