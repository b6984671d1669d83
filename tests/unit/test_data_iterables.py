"""Data that can only be iterated: shared out, never repeated in a pass, found again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from gpumem_nb.engine.data.handed import handed_over
from gpumem_nb.engine.data.iterables import IterableStream, stream_of
from gpumem_nb.engine.data.sameness import agree, look_at
from gpumem_nb.engine.data.stream import Stream
from gpumem_nb.shared.errors import WorkloadError


class Lines(IterableDataset[int]):
    def __init__(self, length: int, shuffled: bool = False) -> None:
        self.length, self.shuffled = length, shuffled

    def __iter__(self) -> Iterator[int]:
        lines = list(range(self.length))
        if self.shuffled:
            random.shuffle(lines)
        yield from lines


class Batches:
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"x": torch.full((4, 2), float(number))} for number in range(5))


def streams(data: Any, size: int) -> list[IterableStream]:
    made = [stream_of(data, rank, size) for rank in range(size)]
    assert all(isinstance(stream, IterableStream) for stream in made)
    return made  # type: ignore[return-value]


def step(all_ranks: list[Any], batch_size: int, count: int = 1) -> list[int]:
    """One step of all ranks, in the order of the stream."""
    own = [[int(x) for batch in stream.micro_batches(batch_size, count) for x in batch] for stream in all_ranks]
    for stream in all_ranks:
        stream.advance(batch_size, count)
    return [place for places in zip(*own, strict=True) for place in places]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_pass_gives_each_sample_once_while_batches_change(size: int) -> None:
    choose, all_ranks = random.Random(size), streams(Lines(17), size)
    seen: list[int] = []
    while len(seen) < 4 * 17:
        seen += step(all_ranks, choose.randint(1, 5), choose.randint(1, 3))
    assert seen[: 3 * 17] == [*range(17)] * 3
    assert all_ranks[0].length is None
    assert all_ranks[0].epoch is None


def test_a_step_that_was_not_done_comes_again_in_any_size() -> None:
    (stream,) = streams(Lines(30), 1)
    assert step([stream], 4) == [0, 1, 2, 3]
    large = [int(x) for batch in stream.micro_batches(8, 1) for x in batch]
    small = [int(x) for batch in stream.micro_batches(2, 2) for x in batch]
    assert large == [*range(4, 12)]
    assert small == large[:4]
    stream.advance(2, 2)
    assert step([stream], 3) == [8, 9, 10]


class Images(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"x": torch.full((1,), 255.0 * number), "text": [number]} for number in range(8))


def in_place(samples: list[dict[str, Any]]) -> Tensor:
    return torch.cat([sample["x"].div_(255) for sample in samples])


def taken_out(samples: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([sample.pop("text").pop() for sample in samples])


@pytest.mark.parametrize("collate", [in_place, taken_out])
def test_a_step_that_comes_again_finds_its_samples_as_they_were_whatever_their_collation_changes(collate: Any) -> None:
    (stream,) = streams(DataLoader(Images(), batch_size=2, collate_fn=collate), 1)
    for _ in range(2):
        assert [batch.tolist() for batch in stream.micro_batches(2, 2)] == [[0, 1], [2, 3]]
    stream.advance(2, 2)
    assert step([stream], 2) == [4, 5]


@pytest.mark.parametrize("before", [3, 9, 12])
@pytest.mark.parametrize("after", [2, 3])
def test_training_that_is_resumed_finds_its_place(before: int, after: int) -> None:
    first, whole = streams(Lines(11, shuffled=True), 2), streams(Lines(11, shuffled=True), 2)
    for _ in range(before):
        step(first, 2)
        step(whole, 2)
    resumed = streams(Lines(11, shuffled=True), after)
    for stream in resumed:
        stream.go_to(first[0].position, first[0].passes, first[0].pass_began)
    expected = [sample for _ in range(6) for sample in step(whole, 3)]
    found = [sample for _ in range(6) for sample in step(resumed, 3)]
    assert all(a == b for a, b in zip(expected, found, strict=False))


def test_shuffling_is_alike_on_all_ranks_and_leaves_the_models_numbers_alone() -> None:
    all_ranks = streams(Lines(8, shuffled=True), 2)
    random.seed(5)
    expected = random.random()
    random.seed(5)
    passes = [step(all_ranks, 4) for _ in range(3)]
    assert random.random() == expected
    assert all(sorted(one) == [*range(8)] for one in passes)
    assert passes[0] != passes[1]


def test_batches_that_come_ready_made_are_shared_out_whole() -> None:
    assert any("taken for a micro-batch" in note for note in handed_over(Batches()).notes)
    all_ranks = streams(Batches(), 2)
    first = [next(stream.micro_batches(4, 1))["x"] for stream in all_ranks]
    assert [x.shape for x in first] == [(4, 2), (4, 2)]
    assert [float(x[0, 0]) for x in first] == [0.0, 1.0]
    assert all(stream.foreign for stream in all_ranks)


def test_a_loader_over_an_iterable_brings_collate_and_batch_size() -> None:
    loader = DataLoader(Lines(10), batch_size=4, num_workers=2, drop_last=True)
    source = handed_over(loader)
    assert (source.info.batch_size, source.info.iterable, source.info.num_workers) == (4, True, None)
    assert any("is not used: num_workers=2, drop_last=True" in note for note in source.notes)
    assert next(stream_of(loader, 0, 1).micro_batches(4, 1)).tolist() == [0, 1, 2, 3]
    ready = handed_over(DataLoader(Lines(10), batch_size=None))
    assert ready.info.batched


def test_a_loader_with_an_iteration_of_its_own_is_an_iterable_of_batches() -> None:
    class Twice(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    (stream,) = streams(Twice([1, 2, 3, 4], batch_size=2), 1)  # type: ignore[arg-type]
    assert next(stream.micro_batches(2, 1)).tolist() == [2, 4]


class Exhausted:
    def __init__(self) -> None:
        self.items = iter(range(3))

    def __iter__(self) -> Iterator[int]:
        yield from self.items


@pytest.mark.parametrize("data", [iter([1, 2]), (x for x in range(3)), map(int, "12")])
def test_what_can_be_iterated_over_once_is_refused(data: Any) -> None:
    with pytest.raises(WorkloadError, match="can be iterated over only once"):
        stream_of(data, 0, 1)


def test_a_pass_that_gives_nothing_ends_in_a_sentence() -> None:
    stream: Stream = stream_of(Exhausted(), 0, 1)
    assert [batch for batch in stream.micro_batches(1, 3)] == [0, 1, 2]
    stream.advance(1, 3)
    with pytest.raises(WorkloadError, match="Pass 2 over the data gave nothing"):
        next(stream.micro_batches(1, 1))


def test_an_iterator_that_failed_is_begun_again_at_its_place() -> None:
    class Failing(IterableDataset[int]):
        healthy = False

        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            if not self.healthy:
                raise OSError("the disk is gone")
            yield from range(5, 10)

    data = Failing()
    (stream,) = streams(data, 1)
    step([stream], 4)
    with pytest.raises(WorkloadError, match="item 5 of pass 1 over the data failed: OSError: the disk is gone"):
        list(stream.micro_batches(3, 1))
    data.healthy = True
    assert step([stream], 3) == [4, 5, 6]


class OwnEpochs(IterableDataset[Any]):
    """Shuffles by a count of its own, which no seed sets."""

    passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        order = torch.randperm(50, generator=torch.Generator().manual_seed(self.passes))
        return iter(order.float().unbind())


def test_an_iterable_whose_passes_nobody_can_repeat_is_told_of() -> None:
    for data, told in ((OwnEpochs(), True), (Lines(50), False), (Lines(50, shuffled=True), False)):
        stream = stream_of(data, 0, 1)
        agree(stream, look_at(stream))
        assert any("each pass over the data gives other samples" in note for note in stream.notes) == told
