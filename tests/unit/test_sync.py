"""What a cell did on one rank alone is made good by what rank 0 holds; here the ranks come one after another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine.looks import sync_of_own
from gpumem_nb.engine.step import joining
from gpumem_nb.shared.errors import WorkloadError
from tests.unit.test_joining import Postman, bits
from tests.unit.test_joining import postman as postman
from tests.unit.test_learning_rates import SCHEDULERS, Bench, set_rates
from tests.unit.test_one_rank import alone as alone


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_ranks_with_other_rates_modes_and_positions_are_made_alike(
    kind: str, postman: Postman, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[list[int]] = []

    def note(numbers: list[int], about: str) -> list[bool]:
        compared.append(list(numbers))
        return [True] * len(numbers)

    monkeypatch.setattr(joining, "alike", note)
    first, second = Bench(SCHEDULERS[kind]), Bench(SCHEDULERS[kind])
    first.train(3)
    second.train(2)
    set_rates(second.own, 0.5, 0.25)
    second.model.eval()
    for rank, bench in enumerate((first, second)):
        postman.become(rank)
        bench.trainer.sync()
    assert compared[0] == compared[1]
    assert [(one.trainer.steps, one.trainer.stream.position) for one in (first, second)] == [(3, 6)] * 2
    assert first.scheduler
    assert second.scheduler
    assert second.scheduler.state_dict() == first.scheduler.state_dict()
    for bench in (first, second):
        bench.train(3)
    assert bits(second.model) == bits(first.model)
    assert [group["lr"] for group in second.own.param_groups] == [group["lr"] for group in first.own.param_groups]


def test_a_schedule_goes_on_alike_on_all_ranks_after_a_sync(postman: Postman, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "alike", lambda numbers, about: [True] * len(numbers))
    first, second = Bench(), Bench()
    for bench, steps in ((first, 3), (second, 2)):  # as where an update raised on one rank alone
        bench.train(steps, lr_schedule="cosine", schedule_steps=10, warmup_steps=4)
    for rank, bench in enumerate((first, second)):
        postman.become(rank)
        bench.trainer.sync()
    assert first.train(4) == second.train(4)
    assert bits(second.model) == bits(first.model)


def test_ranks_whose_optimizers_sort_weights_into_other_groups_are_not_made_alike(
    postman: Postman, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[list[int]] = []

    def note(numbers: list[int], about: str) -> list[bool]:
        compared.append(list(numbers))
        return [len(compared) == 1 or numbers == compared[0]]

    monkeypatch.setattr(joining, "alike", note)
    first, second = Bench(), Bench()
    group = second.own.param_groups[0]
    second.own.add_param_group({"params": [group["params"].pop()]})
    first.trainer.sync()
    postman.become(1)
    with pytest.raises(WorkloadError, match="sort them into other groups of the optimizer"):
        second.trainer.sync()


@dataclass(slots=True)
class Slotted:
    text: Tensor


def test_batches_in_slots_are_compared_by_their_content() -> None:
    one, same, other = (sync_of_own(nn.Linear(1, 1), [Slotted(torch.full((3,), value))]) for value in (1.0, 1.0, 2.0))
    assert one.samples == same.samples != other.samples


def test_samples_in_arrays_of_objects_are_not_compared_by_their_addresses() -> None:
    net = nn.Linear(1, 1)
    assert sync_of_own(net, [np.array([{"a": 1}], dtype=object)]).samples is None
    assert sync_of_own(net, [np.array([1.0])]).samples == sync_of_own(net, [np.array([1.0])]).samples is not None
