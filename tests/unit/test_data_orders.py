"""The order of samples is the sampler's, shared out over the ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from gpumem_nb.engine.data import orders
from gpumem_nb.engine.data.handed import handed_over
from gpumem_nb.engine.data.held_out import as_held_out
from gpumem_nb.engine.data.iterables import stream_of
from gpumem_nb.shared.errors import WorkloadError

ROWS = TensorDataset(torch.arange(20.0))


def epoch(loader: DataLoader[Any], number: int = 0, seed: int = 0) -> list[Any]:
    """What all ranks see together in an epoch."""
    order = orders.of_loader(loader)[0]
    return list(order(seed, number))


def seen(loader: DataLoader[Any], steps: int, size: int = 2, batch_size: int = 2) -> list[int]:
    """Samples in the order of the stream, over all ranks."""
    streams = [stream_of(loader, rank, size) for rank in range(size)]
    found: list[int] = []
    for _ in range(steps):
        for stream in streams:
            for (batch,) in stream.micro_batches(batch_size, 1):
                found += batch.int().tolist()
            stream.advance(batch_size, 1)
    return found


def test_a_subset_is_all_that_is_seen() -> None:
    loader = DataLoader(ROWS, sampler=SubsetRandomSampler(range(8)))
    found = seen(loader, steps=4)
    assert sorted(found) == sorted([*range(8), *range(8)])
    assert found[:8] != found[8:]


def test_a_part_that_is_seen_in_turn_is_all_that_is_validated() -> None:
    loader = DataLoader(ROWS, sampler=SequentialSampler(range(8)))
    assert seen(loader, steps=4) == [*range(8), *range(8)]
    held_out = as_held_out(loader)
    assert [int(held_out.dataset[place][0]) for place in range(len(held_out))] == list(range(8))


def test_the_dataset_is_seen_in_turn_without_shuffling() -> None:
    assert seen(DataLoader(ROWS), steps=6)[:24] == [*range(20), *range(4)]


def test_shuffling_gives_each_epoch_an_order_of_its_own() -> None:
    loader = DataLoader(ROWS, shuffle=True)
    assert sorted(epoch(loader)) == list(range(20))
    assert epoch(loader) == epoch(loader)
    assert not np.array_equal(epoch(loader), epoch(loader, 1))
    assert not np.array_equal(epoch(loader), epoch(loader, seed=1))


def test_a_generator_gives_the_epoch_that_torch_would_give() -> None:
    generator = torch.Generator().manual_seed(7)
    expected = [int(row) for (batch,) in DataLoader(ROWS, shuffle=True, generator=generator) for row in batch]
    fresh = torch.Generator().manual_seed(7)
    state = fresh.get_state()
    loader = DataLoader(ROWS, shuffle=True, generator=fresh)
    assert epoch(loader) == expected
    assert epoch(loader, 1) != expected
    assert torch.equal(fresh.get_state(), state)
    assert fresh.initial_seed() == 7


def test_weights_and_replacement_are_kept() -> None:
    weights = [0.0] * 15 + [1.0] * 5
    drawn = epoch(DataLoader(ROWS, sampler=WeightedRandomSampler(weights, 50)))
    assert len(drawn) == 50
    assert set(drawn) <= set(range(15, 20))
    more = epoch(DataLoader(ROWS, sampler=RandomSampler(ROWS, replacement=True, num_samples=70)))
    assert len(more) == 70
    assert len(set(more)) <= 20


def test_a_distributed_sampler_is_not_sharded_twice() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(ROWS, num_replicas=2, rank=1, seed=5)
    source = handed_over(DataLoader(ROWS, sampler=sampler))
    assert any("DistributedSampler" in note for note in source.notes)
    assert source.order is not None
    whole = list(source.order(0, 3))
    sampler.set_epoch(3)
    assert whole[1::2] == list(sampler)
    unshuffled: DistributedSampler[Any] = DistributedSampler(ROWS, num_replicas=2, rank=1, shuffle=False)
    assert epoch(DataLoader(ROWS, sampler=unshuffled)) == list(range(20))


class Drawing(Sampler[int]):
    """Draws from all three libraries."""

    def __iter__(self) -> Iterator[int]:
        yield from [random.randrange(20), int(np.random.randint(20)), int(torch.randint(20, ())), 3]

    def __len__(self) -> int:
        return 4


def test_a_sampler_of_ones_own_draws_alike_and_leaves_random_numbers_alone() -> None:
    loader = DataLoader(ROWS, sampler=Drawing())
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    first = epoch(loader)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected
    assert epoch(loader) == first
    assert len({tuple(epoch(loader, number)) for number in range(5)}) > 1


def test_an_order_that_is_drawn_on_a_gpu_follows_from_seed_and_epoch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.Generator()  # stands for that of the current one
    own = {"get_rng_state": gpu.get_state, "set_rng_state": gpu.set_state, "manual_seed": gpu.manual_seed}
    for name, stand_in in {"is_initialized": lambda: True, **own}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    class OnGpu(Drawing):
        def __iter__(self) -> Iterator[int]:
            yield from torch.randperm(4, generator=gpu).tolist()

    loader = DataLoader(ROWS, sampler=OnGpu())
    orders = [epoch(loader, number) for number in range(6)]
    gpu.manual_seed(7)  # ranks draw different numbers for dropout
    assert [epoch(loader, number) for number in range(6)] == orders
    assert len(set(map(tuple, orders))) > 1


class Restless(Sampler[int]):
    def __init__(self) -> None:
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        yield from [self.calls, 0]

    def __len__(self) -> int:
        return 2


class Shrinking(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from range(4 - self.epoch)

    def __len__(self) -> int:
        return 4


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0

    def __len__(self) -> int:
        return 4


class Lengthless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield 0


class Pairs(BatchSampler):
    """Another one than torch's."""


@pytest.mark.parametrize(
    ("sampler", "sentence"),
    [
        (Restless(), r"sampler \(Restless\) gives another order each time it is asked"),
        (Shrinking(), r"sampler \(Shrinking\) gives epochs of different lengths"),
        (Endless(), r"sampler \(Endless\) gives more than the 4 samples"),
        (Lengthless(), r"sampler \(Lengthless\) has no length.* Give it __len__"),
    ],
)
def test_samplers_that_cannot_be_shared_out_are_named(sampler: Sampler[int], sentence: str) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        orders.check(orders.of_loader(DataLoader(ROWS, sampler=sampler))[0], 0)


def test_batch_samplers_of_ones_own_are_named_and_torchs_are_taken_apart() -> None:
    with pytest.raises(WorkloadError, match=r"batch sampler \(Pairs\) .* Give the DataLoader a sampler="):
        orders.of_loader(DataLoader(ROWS, batch_sampler=Pairs(SequentialSampler(ROWS), 2, False)))
    loader = DataLoader(ROWS, batch_sampler=BatchSampler(SubsetRandomSampler(range(4)), 3, False))
    assert sorted(epoch(loader)) == [0, 1, 2, 3]
    assert handed_over(loader).info.batch_size == 3
