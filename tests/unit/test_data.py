"""The stream of samples, for every rank of a made-up size."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpumem_nb.engine.data.device import to_device
from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream


def streams(length: int, size: int) -> list[ShardedStream]:
    return [ShardedStream(list(range(length)), list, rank, size) for rank in range(size)]


def take(all_ranks: list[ShardedStream], batch_size: int, count: int) -> list[int]:
    """One step of all ranks, in the order of the epoch."""
    seen = [sample for stream in all_ranks for batch in stream.micro_batches(batch_size, count) for sample in batch]
    for stream in all_ranks:
        stream.advance(batch_size, count)
    return seen


@pytest.mark.parametrize("seed", range(5))
def test_epochs_are_permutations_under_random_flips(seed: int) -> None:
    choose = random.Random(seed)
    length, size = choose.randint(50, 200), choose.randint(1, 5)
    all_ranks = streams(length, size)
    seen: list[int] = []
    while len(seen) < 4 * length:
        seen += take(all_ranks, choose.randint(1, 5), choose.randint(1, 3))
    epochs = [seen[start : start + length] for start in range(0, 3 * length, length)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("split", [(12, 1), (6, 2), (4, 3), (1, 12)])
def test_splitting_a_step_moves_no_sample(split: tuple[int, int]) -> None:
    for stream, whole in zip(streams(100, 2), streams(100, 2), strict=True):
        parts = [sample for batch in stream.micro_batches(*split) for sample in batch]
        assert parts == next(whole.micro_batches(12, 1))


def test_reading_a_step_again_gives_the_same_until_it_is_done() -> None:
    stream = streams(40, 2)[1]
    assert list(stream.micro_batches(3, 2)) == list(stream.micro_batches(3, 2))
    first = list(stream.micro_batches(3, 2))
    stream.advance(3, 2)
    assert list(stream.micro_batches(3, 2)) != first
    assert stream.epoch == pytest.approx(12 / 40)


def test_a_loader_brings_dataset_and_collate() -> None:
    rows = TensorDataset(torch.arange(6.0))

    def collate(samples: list[Any]) -> str:
        return f"{len(samples)} samples"

    dataset, found = as_dataset(DataLoader(rows, collate_fn=collate))
    assert dataset is rows
    assert found([1, 2]) == "2 samples"


def test_batches_of_any_shape_move() -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", "x y")
    batch = {"a": [torch.ones(2), "text"], "b": Pair(torch.zeros(1), 3)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].x.device.type == "meta"
