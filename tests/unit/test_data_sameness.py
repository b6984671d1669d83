"""Ranks that hold different data are refused, by length, order or samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from gpumem_nb.engine.data.iterables import stream_of
from gpumem_nb.engine.data.sameness import agree, look_at
from gpumem_nb.engine.data.stream import Stream
from gpumem_nb.shared.errors import WorkloadError
from tests.links import overheard


def compared(monkeypatch: pytest.MonkeyPatch, *data: Any) -> list[Stream]:
    """The streams of ranks that hold these."""
    streams = [stream_of(one, rank, len(data)) for rank, one in enumerate(data)]
    looks = [look_at(stream) for stream in streams]
    monkeypatch.setattr(overheard(monkeypatch), "numbers", lambda own, about: [list(look) for look in looks])
    for stream, look in zip(streams, looks, strict=True):
        agree(stream, look)
    return streams


def rows(*values: float) -> TensorDataset:
    return TensorDataset(torch.tensor(values))


def test_lengths_orders_and_samples_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared(monkeypatch, rows(1, 2, 3), rows(1, 2, 3))
    with pytest.raises(WorkloadError, match="rank 0 has 3 samples, rank 2 has 4"):
        compared(monkeypatch, rows(1, 2, 3), rows(1, 2, 3), rows(1, 2, 3, 4))
    with pytest.raises(WorkloadError, match="order of samples on rank 1 is not that on rank 0"):
        compared(monkeypatch, DataLoader(rows(1, 2, 3), sampler=[0, 1]), DataLoader(rows(1, 2, 3), sampler=[1, 2]))
    with pytest.raises(WorkloadError, match="samples on rank 1 are not those on rank 0"):
        compared(monkeypatch, rows(1, 2, 3), rows(1, 2, 4))


@pytest.mark.parametrize(
    "pair",
    [
        ([{"a": 1.5, "b": "x"}], [{"a": 1.5, "b": "y"}]),
        ([(torch.ones(2, dtype=torch.bfloat16), 1)], [(torch.zeros(2, dtype=torch.bfloat16), 1)]),
        ([b"abc"], [b"abd"]),
        ([torch.ones(1).expand(3)], [torch.zeros(1).expand(3)]),
        ([torch.tensor([1 + 2j]).conj()], [torch.tensor([1 + 2j])]),
    ],
)
def test_samples_of_any_kind_are_told_apart(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    several = [one * 2 for one in pair]
    compared(monkeypatch, several[0], several[0])
    with pytest.raises(WorkloadError, match="hold different data"):
        compared(monkeypatch, *several)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_samples_are_told_apart(layout: torch.layout, monkeypatch: pytest.MonkeyPatch) -> None:
    def samples(value: float) -> list[Tensor]:
        parts = [torch.full((length,), value) for length in (2, 3)]
        return [torch.nested.nested_tensor(parts, layout=layout) for _ in range(2)]

    assert not any(stream.notes for stream in compared(monkeypatch, samples(1.0), samples(1.0)))
    with pytest.raises(WorkloadError, match="hold different data"):
        compared(monkeypatch, samples(1.0), samples(2.0))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.float64]
)
def test_samples_of_any_type_are_told_apart(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ([torch.tensor([1, value]).to(dtype), torch.zeros(0, dtype=dtype)] for value in (0, 1))
    compared(monkeypatch, one, list(one))
    with pytest.raises(WorkloadError, match="hold different data"):
        compared(monkeypatch, one, other)


def test_iterables_are_compared_by_what_they_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lines(IterableDataset[int]):
        def __init__(self, start: int) -> None:
            self.start = start

        def __iter__(self) -> Any:
            return iter(range(self.start, 9))

    compared(monkeypatch, Lines(0), Lines(0))
    with pytest.raises(WorkloadError, match="samples on rank 1 are not those on rank 0"):
        compared(monkeypatch, Lines(0), Lines(1))
    with pytest.raises(WorkloadError, match="The data gave nothing"):
        compared(monkeypatch, Lines(9), Lines(9))


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2)


class Cached(Noise):
    def __init__(self) -> None:
        self.drawn: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        return self.drawn[index] if index in self.drawn else self.drawn.setdefault(index, torch.rand(2))


def test_samples_that_draw_random_numbers_are_known_and_leave_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert all(stream.draws for stream in compared(monkeypatch, Noise(), Noise()))
    assert torch.equal(torch.rand(1), expected)
    assert not any(stream.draws for stream in compared(monkeypatch, rows(1, 2), rows(1, 2)))

    def masking(samples: list[Any]) -> Tensor:
        return torch.rand(len(samples))

    loader = DataLoader(rows(1, 2), collate_fn=masking)
    assert all(stream.draws for stream in compared(monkeypatch, loader, loader))
    assert not any(stream.unsteady for stream in compared(monkeypatch, loader, loader))
    assert not any(stream.unsteady for stream in compared(monkeypatch, Noise(), Noise()))
    assert all(stream.unsteady and not stream.notes for stream in compared(monkeypatch, Cached(), Cached()))
    numbers = np.random.default_rng(3)
    own = DataLoader(rows(1, 2), collate_fn=lambda samples: torch.tensor(numbers.random(len(samples))))
    assert all(stream.unsteady for stream in compared(monkeypatch, own, own))


def test_samples_that_change_by_themselves_are_not_compared_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Noise):
        def __init__(self, begun: int) -> None:
            self.asked = begun

        def __getitem__(self, index: int) -> Tensor:
            self.asked += 1
            return torch.tensor(self.asked)

    (stream, _) = compared(monkeypatch, Counting(0), Counting(100))
    assert any("gives other samples each time" in note for note in stream.notes)


def test_a_dataset_of_which_no_sample_can_be_fetched_is_refused() -> None:
    frame = {0: "a", 2: "b"}  # whose keys are no places
    with pytest.raises(WorkloadError, match=r"None of 1 samples.*sample 3 failed: KeyError"):
        look_at(stream_of(DataLoader(frame, sampler=[3]), 0, 1))  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="has 2 samples, fewer than the 3 ranks"):
        look_at(stream_of(rows(1, 2), 0, 3))


def test_the_size_of_ready_made_batches_is_found() -> None:
    stream = stream_of(DataLoader([{"x": torch.ones(5, 2)}] * 3, batch_size=None), 0, 1)  # type: ignore[arg-type]
    look_at(stream)
    assert stream.info.batch_size == 5
    with pytest.raises(WorkloadError, match="micro-batches of 5 samples"):
        next(stream.micro_batches(4, 1))
    assert stream.notes == ()


def test_of_ready_made_batches_of_other_sizes_it_is_said_what_speeds_count() -> None:
    batches = [torch.ones(size, 2) for size in (5, 3, 8)]
    handed: list[Any] = [DataLoader(batches, batch_size=None), iter_anew(batches)]  # type: ignore[arg-type]
    for data in handed:
        stream = stream_of(data, 0, 1)
        look_at(stream)
        assert stream.info.batch_size == 5
        assert stream.notes[-1] == "micro-batches of the data hold 3 to 8 samples, and samples/s count 5 of each"


def iter_anew(items: list[Tensor]) -> Any:
    class Batches:
        def __iter__(self) -> Any:
            return iter(items)

    return Batches()
