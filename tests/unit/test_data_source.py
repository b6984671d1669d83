"""What people hand over as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from gpumem_nb.engine.data.handed import as_dataset, handed_over
from gpumem_nb.engine.data.iterables import stream_of
from gpumem_nb.engine.data.sameness import agree, look_at
from gpumem_nb.engine.data.stream import Stream
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.settings import Settings

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


def first(data: Any, batch_size: int = 6, **knobs: Any) -> Any:
    """The first micro-batch of the only rank."""
    stream = stream_of(data, 0, 1)
    stream.load_with(Settings(**knobs))
    return next(stream.micro_batches(batch_size, 1)), stream


@pytest.mark.parametrize("labels", [Y, Y.numpy()])
def test_a_pair_of_tensors_or_arrays_is_a_dataset_of_its_rows(labels: Any) -> None:
    (inputs, targets), _ = first((X, labels))
    assert isinstance(targets, Tensor)
    assert torch.equal(inputs, X[targets])


def test_a_dict_of_tensors_is_a_dataset_of_dicts() -> None:
    batch, _ = first({"x": X, "y": np.arange(6)})
    assert torch.equal(batch["x"], X[batch["y"]])


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(WorkloadError, match="'x' has 6, 'y' has 5 rows"):
        handed_over({"x": X, "y": Y[:5]})
    with pytest.raises(WorkloadError, match="does not hold tensors or arrays alone, under its keys 'x', 'size'"):
        handed_over({"x": X, "size": 3})
    with pytest.raises(WorkloadError, match=r"\(tuple\) does not hold tensors or arrays alone\. Give tensors"):
        handed_over((X, Y.tolist()))


@pytest.mark.parametrize("data", [3, len])
def test_what_is_no_data_is_refused(data: Any) -> None:
    with pytest.raises(WorkloadError, match="neither __len__ and __getitem__ nor __iter__"):
        handed_over(data)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(WorkloadError, match="The dataset is empty"):
        handed_over([])


def test_a_loaders_numbers_become_the_knobs_first_values() -> None:
    loader = DataLoader(TensorDataset(X), batch_size=4, num_workers=2, prefetch_factor=3, drop_last=True)
    source = handed_over(loader)
    assert (source.info.batch_size, source.info.num_workers, source.info.prefetch_factor) == (4, 2, 3)
    assert "batch_size=4, num_workers=2, prefetch_factor=3, as the DataLoader has it" in source.notes
    assert any("drop_last=True drops nothing" in note for note in source.notes)


def test_pinning_where_it_has_no_effect_is_said() -> None:
    loader = DataLoader(TensorDataset(X), pin_memory=True)
    stream = stream_of(loader, 0, 1)
    info, notes = stream.described(pinnable=False)
    assert not info.pinnable
    assert any("pin_memory=True of the DataLoader has no effect" in note for note in notes)


class Sevens(Dataset[int]):
    """Whose samples with a seven cannot be read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise OSError("unreadable")
        return index


def numbers(stream: Stream, **knobs: Any) -> list[int]:
    stream.load_with(Settings(**knobs))
    return sorted(int(number) for batch in stream.micro_batches(5, 2) for number in batch)


def test_a_bad_sample_is_named_or_skipped() -> None:
    stream = stream_of(Sevens(), 0, 1)
    with pytest.raises(
        WorkloadError, match=r"^sample 7 of the data failed: OSError: unreadable\. .*on_bad_sample=skip"
    ):
        numbers(stream)
    assert numbers(stream, on_bad_sample="skip") == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert stream.take_skipped() == ("sample 7 of the data failed: OSError: unreadable",)
    assert not stream.take_skipped()


def test_a_micro_batch_without_any_sample_fails() -> None:
    stream = stream_of(DataLoader(Sevens(), sampler=[7, 7], batch_size=2), 0, 1)
    stream.load_with(Settings(on_bad_sample="skip"))
    with pytest.raises(WorkloadError, match="No sample of a micro-batch could be fetched; sample 7"):
        next(stream.micro_batches(2, 1))


def test_a_bad_sample_among_samples_that_come_together_is_named() -> None:
    class Together(Sevens):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [self[index] for index in indices]

    stream = stream_of(Together(), 0, 1)
    with pytest.raises(WorkloadError, match=r"^sample 7 of the data failed: OSError: unreadable"):
        numbers(stream)
    assert len(numbers(stream, on_bad_sample="skip")) == 9


def test_lack_of_memory_is_no_bad_sample() -> None:
    class Large(Sevens):
        def __getitem__(self, index: int) -> int:
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        first(Large(), on_bad_sample="skip")


def test_samples_of_different_shapes_ask_for_a_collate_function() -> None:
    with pytest.raises(WorkloadError, match=r"differ in shape .*collate_fn"):
        first([torch.zeros(length) for length in (1, 2, 3)], 3)
    with pytest.raises(WorkloadError, match=r"cannot be made a batch .*collate_fn"):
        first([object(), object()], 2)


def test_items_that_are_batches_already_are_handed_over_one_by_one() -> None:
    batches = [{"x": X[:3], "y": Y[:3]}, {"x": X[3:], "y": Y[3:]}]
    assert any("DataLoader(data, batch_size=None)" in note for note in handed_over(batches).notes)
    stream = stream_of(DataLoader(batches, batch_size=None), 0, 1)  # type: ignore[arg-type]
    found = [batch["y"].tolist() for batch in stream.micro_batches(3, 2)]
    assert found == [[0, 1, 2], [3, 4, 5]]


def test_a_batch_sampler_in_place_of_a_sampler_asks_the_dataset_for_whole_micro_batches() -> None:
    rows = Subset(TensorDataset(Y), range(1, 5))  # which has __getitems__
    loader = DataLoader(rows, sampler=BatchSampler(SequentialSampler(rows), 2, False), batch_size=None)
    stream = stream_of(loader, 0, 1)
    agree(stream, look_at(stream))
    assert stream.info.batch_size == 2
    found = [batch.tolist() for (batch,) in stream.micro_batches(2, 2)]
    assert found == [batch.tolist() for (batch,) in loader] == [[1, 2], [3, 4]]


def test_samples_in_a_list_are_no_batches() -> None:
    assert not handed_over([(X[0], 1), (X[1], 2)]).notes
    assert not handed_over([{"ids": Y, "mask": Y}]).notes


def test_evaluation_needs_a_dataset_and_sees_what_the_sampler_chose() -> None:
    class Lines:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(WorkloadError, match="brings micro-batches of its own"):
        as_dataset(Lines())
    with pytest.raises(WorkloadError, match="can only be iterated"):
        as_dataset(LinesOfTorch())
    dataset, _ = as_dataset(DataLoader(TensorDataset(Y), sampler=SubsetRandomSampler([1, 4])))
    assert sorted(int(row) for (row,) in dataset) == [1, 4]


class LinesOfTorch(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(())


@pytest.mark.parametrize("split", [(8, 1), (4, 2), (2, 4)])
def test_augmentation_depends_on_the_place_alone(split: tuple[int, int]) -> None:
    streams = [stream_of(Noisy(), 1, 2) for _ in range(2)]
    for stream in streams:
        stream.draws = True
    torch.manual_seed(3)
    drawn = torch.rand(())
    torch.manual_seed(3)
    expected = next(streams[0].micro_batches(8, 1))
    assert torch.equal(torch.cat(list(streams[1].micro_batches(*split))), expected)
    assert torch.equal(torch.rand(()), drawn), "the model's random numbers are left alone"
