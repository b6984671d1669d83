"""The stream of samples, for every rank of a made-up size."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpumem_nb.engine.data.fetching import to_device
from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.memory.tensors import tensors_in
from gpumem_nb.shared.errors import WorkloadError


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


def test_rows_that_come_without_a_cell_are_told_of_as_the_next_epoch_begins() -> None:
    data = [torch.ones(1) for _ in range(8)]
    stream = ShardedStream(*as_dataset(data), rank=0, size=1)
    for _ in range(2):
        list(stream.micro_batches(2, 2))
        stream.advance(2, 2)
        data[8:] = [torch.ones(1)]  # as a loss may, that collects hard samples
    with pytest.raises(WorkloadError, match="has 9 samples now and had 8"):
        list(stream.micro_batches(2, 2))


def test_a_loader_brings_dataset_and_collate() -> None:
    rows = TensorDataset(torch.arange(6.0))

    def collate(samples: list[Any]) -> str:
        return f"{len(samples)} samples"

    dataset, found = as_dataset(DataLoader(rows, collate_fn=collate))
    assert dataset is rows
    assert found([1, 2]) == "2 samples"


class Words(UserDict[str, Any]):
    """Like transformers' BatchEncoding."""

    def to(self, device: torch.device) -> Words:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Case(dict[str, Any]):
    source = ""


@dataclass
class Pair:
    x: torch.Tensor
    y: Any = None
    length: int = field(init=False, default=0)


@dataclass(frozen=True, slots=True)
class Fixed:
    x: torch.Tensor
    size: torch.Size

    def __post_init__(self) -> None:
        assert self.x.device.type == "cpu", "is not run again for the one that is on the device"


class Checked(NamedTuple("Checked", [("x", torch.Tensor)])):
    def __new__(cls, x: torch.Tensor) -> Checked:
        assert x.device.type == "cpu"
        return super().__new__(cls, x)


class Several(list[Any]):
    name = ""


def with_attributes(value: Any, **attributes: Any) -> Any:
    for name, item in attributes.items():
        setattr(value, name, item)
    return value


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(
    "batch",
    [
        Words(x=torch.ones(2)),
        with_attributes(Case(x=torch.ones(2)), source="here"),
        OrderedDict(x=torch.ones(2)),
        defaultdict(lambda: torch.ones(1), x=torch.ones(2)),
        MappingProxyType({"x": torch.ones(2)}),
        with_attributes(Pair(torch.ones(2), y=[torch.ones(3)]), length=4),
        Fixed(torch.ones(2), torch.Size([2])),
        Checked(torch.ones(2)),
        SimpleNamespace(x=torch.ones(2)),
        with_attributes(Several([torch.ones(2)]), name="these"),
        deque([torch.ones(2)], maxlen=1),
        {"x": Pair(torch.ones(2), y=Words(z=torch.ones(1)))},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_moves_in_what_it_came_in(batch: Any, copy: bool) -> None:
    kind, content, held = type(batch), tensors_in(batch), getattr(batch, "__dict__", {}).keys()
    before = list(content)
    moved = to_device(batch, torch.device("meta"), copy)
    assert type(moved) is kind
    assert [tensor.device.type for tensor in tensors_in(moved)] == ["meta"] * len(before)
    assert [tensor.shape for tensor in tensors_in(moved)] == [tensor.shape for tensor in before]
    assert getattr(moved, "__dict__", {}).keys() == held
    assert all(tensor.device.type == "cpu" for tensor in tensors_in(batch)), "the data set keeps its own"
    for name in ("source", "length", "name", "size", "maxlen", "default_factory"):
        assert getattr(moved, name, None) == getattr(batch, name, None)


def test_what_another_process_shares_is_copied_whatever_it_comes_in() -> None:
    batch: Any
    for batch in (Words(x=torch.ones(2)), Pair(torch.ones(2)), Fixed(torch.ones(2), torch.Size([2]))):
        (before,) = tensors_in(batch)
        (after,) = tensors_in(to_device(batch, torch.device("cpu"), copy=True))
        assert after.data_ptr() != before.data_ptr()


def test_batches_of_any_shape_move() -> None:
    from collections import namedtuple

    Pair = namedtuple("Pair", "x y")
    batch = {"a": [torch.ones(2), "text"], "b": Pair(torch.zeros(1), 3)}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].x.device.type == "meta"
