"""Training draws random numbers of its own: cells do not move them, nor are they moved by them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gpumem_nb.engine.data.iterables import stream_of
from gpumem_nb.engine.random_state import OwnNumbers, RandomState, seed_all
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone, tried

__all__ = ["alone"]


class Noisy(Dataset[Tensor]):
    """Each sample draws from Python's and NumPy's random numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index + random.random() + float(np.random.rand()))


def trainer(seed: int = 0, rank: int = 0) -> Trainer:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        output: Tensor = model(batch)
        return output.square().mean()

    workload = Workload("noisy", model, Noisy, loss)
    return Trainer(workload, stream_of(Noisy(), rank, 1, seed), opened(), time.time())


def losses(trainer: Trainer, steps: int) -> list[float | None]:
    reply = trainer.run(Chunk(Settings(batch_size=4), 1, steps))
    assert reply.failure is None
    return [sample.loss for sample in reply.samples]


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = RandomState.take()
    yield
    before.put_back()


def test_training_and_cells_do_not_move_each_others_numbers() -> None:
    undisturbed = losses(trainer(), 6)
    seed_all(3)
    expected = [draws() for _ in range(4)]

    seed_all(3)
    disturbed = trainer()
    drawn, seen = [draws()], []
    for steps in (1, 2, 3):
        seen += losses(disturbed, steps)
        drawn.append(draws())
    assert seen == undisturbed
    assert drawn == expected


def test_a_recorded_step_and_a_trial_move_neither() -> None:
    undisturbed, disturbed = losses(trainer(), 4), trainer()
    seen = losses(disturbed, 2)
    seed_all(3)
    expected = draws()
    seed_all(3)
    disturbed.record()
    assert tried(disturbed, Settings(batch_size=8)) is None
    assert draws() == expected
    assert seen + losses(disturbed, 2) == undisturbed


def test_what_a_failing_step_drew_is_put_back_on_both_sides() -> None:
    one = trainer()
    undisturbed, training = losses(trainer(), 3), one.live.model
    seen = losses(one, 1)
    seed_all(3)
    expected = draws()
    seed_all(3)

    def fail(*_: object) -> None:
        raise ValueError("planted")

    hook = training[2].register_forward_pre_hook(fail)  # type: ignore[index]
    assert one.run(Chunk(Settings(batch_size=4), 5, 1)).failure is not None
    hook.remove()
    assert draws() == expected
    assert seen + losses(one, 2) == undisturbed


@pytest.mark.parametrize("different", [{"seed": 1}, {"rank": 1}])
def test_seed_and_rank_give_other_numbers(different: dict[str, int]) -> None:
    numbers, others = OwnNumbers(0, 0), OwnNumbers(**({"seed": 0, "rank": 0} | different))
    numbers.exchange()
    drawn = draws()
    numbers.exchange()
    others.exchange()
    drawn_by_others = draws()
    others.exchange()
    assert not {*drawn} & {*drawn_by_others}


def test_ranks_begin_with_the_documented_seed() -> None:
    numbers = OwnNumbers(7, 3)
    numbers.exchange()
    drawn = draws()
    numbers.exchange()
    seed_all(int(np.random.SeedSequence([7, 3]).generate_state(1)[0]))
    assert draws() == drawn


def test_a_seed_fixes_weights_order_and_noise() -> None:
    first = losses(trainer(seed=5), 4)
    draws()
    assert losses(trainer(seed=5), 4) == first
    assert losses(trainer(seed=6), 4) != first


def test_weights_are_those_of_torchs_own_seed() -> None:
    weights = trainer(seed=5).live.model.state_dict()
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain.items())


def test_another_seed_counts_until_the_first_step() -> None:
    weights = trainer(seed=0).live.model.state_dict()
    reference, late = trainer(seed=5), trainer(seed=0)
    reference.live.model.load_state_dict(weights)
    late.record()  # undone, so it is no step; it has looked at the order of the data
    assert late.reseed(5)
    assert losses(late, 3) == losses(reference, 3)
    assert not late.reseed(6)
    assert losses(late, 2) == losses(reference, 2)
