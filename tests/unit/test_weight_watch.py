"""What the ranks compare of their weights and buffers, and what they say of a difference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine import cells
from gpumem_nb.engine.step import ballot
from gpumem_nb.engine.step.ballot import WeightWatch
from gpumem_nb.engine.step.parts import Parts
from tests.links import overheard


class Net(nn.Module):
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", torch.zeros(2))


def watch(net: nn.Module) -> WeightWatch:
    return WeightWatch(Parts(net, lambda model, batch: model))


def digest(one: WeightWatch) -> list[float]:
    one.begin()
    return one.digest().tolist()


@pytest.mark.parametrize("by_a_cell", [False, True])
def test_a_buffer_that_other_steps_than_the_compared_ones_change_is_each_ranks_own(by_a_cell: bool) -> None:
    nets = [Net(), Net()]
    watches = [watch(net) for net in nets]
    assert digest(watches[0]) == digest(watches[1])
    for one in watches:
        one.agreed(0)
    if by_a_cell:
        cells.one_more()
    for number, net in enumerate(nets):
        net.kept += 1 + number  # every tenth step, say
    assert (digest(watches[0]) == digest(watches[1])) is not by_a_cell


def test_what_was_overwritten_from_a_file_is_compared() -> None:
    nets = [Net(), Net()]
    watches = [watch(net) for net in nets]
    for number, (one, net) in enumerate(zip(watches, nets, strict=True)):
        digest(one)
        one.agreed(0)
        net.kept += number + 1
        one.begin_anew()
    assert digest(watches[0]) != digest(watches[1])


def test_a_buffer_that_only_one_rank_has_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[str] = []

    def gather(own: list[int], about: str) -> list[list[int]]:
        gathered.append(about)
        return [list(own), [one + 1 for one in own]]

    monkeypatch.setattr(overheard(monkeypatch), "numbers", gather)
    assert "of different names" in watch(Net()).examine()
    assert len(gathered) == 1  # rows of other lengths cannot be gathered


def test_what_a_cell_did_to_the_optimizer_is_looked_for_after_the_next_update_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = Net()
    one = watch(net)

    def compared(step: int) -> None:
        assert one.due(step)
        digest(one)
        one.agreed(step)

    compared(0)
    assert not one.due(1)
    cells.one_more()
    compared(5)
    compared(6)
    assert not one.due(7)
    cells.one_more()
    compared(7)

    def gather(own: list[int], about: str) -> list[list[int]]:
        ran, first, *others = own
        return [[0, first, *others], [ran, first + 1, *others]]

    monkeypatch.setattr(overheard(monkeypatch), "numbers", gather)
    monkeypatch.setattr(ballot, "same_everywhere", lambda number, about: True)
    assert "A cell ran on rank 1 alone meanwhile" in one.examine()
