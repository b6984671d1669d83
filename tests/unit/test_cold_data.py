"""What data cold predictions take, and what micro-batches they make of it: as ranks would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

import gpumem_nb as gm
from gpumem_nb.engine.dry.batches import Batches
from gpumem_nb.planning.cold_table import ColdPredictions
from gpumem_nb.planning.prediction import Prediction
from gpumem_nb.shared.errors import GpumemError, InvalidInput, WorkloadError

pytestmark = pytest.mark.usefixtures("dry_runs_forked")
WIDTH = 256


def predict(data: Callable[[], Any], loss: Any = None, **arguments: Any) -> Prediction:
    predicted = gm.predict(gm.Workload("mine", model, data, loss or mean_loss), **arguments)
    assert isinstance(predicted, Prediction)
    return predicted


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.ReLU(), nn.Linear(8 * WIDTH, 4))


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def rows(count: int = 8) -> list[tuple[Tensor, int]]:
    return [(torch.zeros(WIDTH), index % 4) for index in range(count)]


def in_columns(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


class Lines(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows())


@dataclasses.dataclass
class Batch:
    inputs: Tensor
    size: int


class Opaque:
    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs


def test_one_entry_for_each_sample_grows_with_the_batch() -> None:
    """As torchvision's detection models have it: lists of images and of targets."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        images, targets = batch
        return nn.functional.cross_entropy(model(torch.stack(list(images))), torch.as_tensor(targets))

    def data() -> Any:
        return DataLoader([(torch.zeros(WIDTH), 0)] * 9, collate_fn=in_columns)  # type: ignore[arg-type]

    few, many = (predict(data, loss, batch_size=size).live_peak_bytes for size in (16, 4096))
    assert many - few > 4080 * 8 * WIDTH * 4  # what the first layer gives


def columns(of: Any) -> tuple[Any, ...]:
    return Batches(DataLoader(of, collate_fn=in_columns)).of(5)  # type: ignore[no-any-return]


def test_parts_of_every_kind_grow() -> None:
    images, sizes = columns([(torch.zeros(3, 2), 7)] * 3)
    assert [image.shape for image in images] == [(3, 2)] * 5
    assert sizes == (7,) * 5

    def collate(samples: list[Any]) -> Any:
        inputs = torch.stack(samples)
        return {
            "array": inputs.numpy(),
            "mine": Batch(inputs, len(samples)),
            "joined": torch.cat(samples),
            "pointers": torch.arange(len(samples) + 1),
            "name": "x",
        }

    found = Batches(DataLoader([torch.zeros(3)] * 4, collate_fn=collate)).of(100)  # type: ignore[arg-type]
    assert found["array"].shape == (100, 3)
    assert (found["mine"].inputs.shape, found["mine"].size) == ((100, 3), 100)
    assert (found["joined"].shape, found["pointers"].shape, found["name"]) == ((300,), (101,), "x")


def test_what_cannot_be_told_is_refused() -> None:
    opaque: Any = DataLoader([torch.zeros(3)], collate_fn=lambda samples: Opaque(torch.stack(samples)))  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="hold a Opaque, and what that would be with 5 samples cannot be told"):
        Batches(opaque).of(5)
    sparse: Any = DataLoader([torch.eye(3)], collate_fn=lambda samples: {"x": torch.stack(samples).to_sparse()})  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match=r"hold a tensor of layout torch\.sparse_coo, and what that would be"):
        Batches(sparse).of(5)
    blocks: Any = DataLoader([torch.zeros(3)], collate_fn=lambda samples: torch.zeros(len(samples) ** 2))  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="have the lengths 4, 16, 64, from which that of 5 samples cannot be told"):
        Batches(blocks).of(5)


def padded(lengths: list[int]) -> Any:
    data = [torch.zeros(length, dtype=torch.long) for length in lengths]
    return DataLoader(data, collate_fn=lambda samples: pad_sequence(samples, batch_first=True))  # type: ignore[arg-type]


def test_samples_of_different_sizes_are_as_the_largest() -> None:
    for lengths in ([20, 12, 17, 512], [20, 12, 30], [512, 20]):
        batches = Batches(padded(lengths))
        assert batches.of(64).shape == (64, max(lengths))
        assert batches.varies
    assert not Batches(padded([20, 20])).varies
    cut: Any = DataLoader(["a", "much longer"], collate_fn=lambda texts: torch.zeros(len(texts), 7))  # type: ignore[arg-type]
    assert not Batches(cut).varies


def padded_parts(samples: list[Any]) -> Any:
    return {name: pad_sequence([sample[name] for sample in samples], batch_first=True) for name in samples[0]}


@pytest.mark.parametrize("reverse", [False, True])
def test_parts_that_are_largest_in_different_samples_are_as_large_together(reverse: bool) -> None:
    lengths = [(10, 700), (500, 20), (30, 30), (500, 20)]
    data = [{"text": torch.zeros(text), "image": torch.zeros(image, 3)} for text, image in lengths]
    batches = Batches(DataLoader(data[::-1] if reverse else data, collate_fn=padded_parts))  # type: ignore[arg-type]
    found = batches.of(6)
    assert (found["text"].shape, found["image"].shape) == ((6, 500), (6, 700, 3))
    assert batches.varies


def test_parts_inside_of_parts_are_as_large_together() -> None:
    def columns(samples: list[Any]) -> Any:
        firsts, seconds, texts = zip(*((*parts, text) for parts, text in samples), strict=True)
        letters = torch.zeros(len(texts), max(map(len, texts)))
        return pad_sequence(list(firsts), batch_first=True), pad_sequence(list(seconds), batch_first=True), letters

    data: Any = [([torch.zeros(9), torch.zeros(1)], "a"), ([torch.zeros(1), torch.zeros(7)], "abc")]
    found = Batches(DataLoader(data, collate_fn=columns)).of(5)
    assert [part.shape for part in found] == [(5, 9), (5, 7), (5, 3)]


def test_parts_that_do_not_go_together_are_those_of_the_largest_sample() -> None:
    def collate(samples: list[Any]) -> Any:
        assert all(len(first) + len(second) < 10 for first, second in samples)
        return tuple(pad_sequence(list(part), batch_first=True) for part in zip(*samples, strict=True))

    data: Any = [(torch.zeros(8), torch.zeros(1)), (torch.zeros(1), torch.zeros(7))]
    found = Batches(DataLoader(data, collate_fn=collate)).of(5)
    assert [part.shape for part in found] == [(5, 8), (5, 1)]


class Brought:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def test_micro_batches_that_the_data_brings_are_not_mixed() -> None:
    brought = [(torch.zeros(4, 2), torch.zeros(4, 50)), (torch.zeros(8, 30), torch.zeros(8, 2))]
    assert [part.shape for part in Batches(Brought(brought)).of(8)] == [(8, 30), (8, 2)]


def test_the_prediction_is_that_of_a_micro_batch_with_both() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["text"].new_zeros(*batch["text"].shape, WIDTH)).mean() + batch["image"].sum()  # type: ignore[no-any-return]

    def predicted(*lengths: tuple[int, int]) -> Prediction:
        data = [{"text": torch.zeros(text), "image": torch.zeros(image, 3)} for text, image in lengths]
        return predict(lambda: DataLoader(data, collate_fn=padded_parts), loss, batch_size=16)  # type: ignore[arg-type]

    apart, together = predicted((10, 7000), (50, 20)), predicted((50, 7000), (50, 7000))
    assert apart.live_peak_bytes == together.live_peak_bytes


def test_samples_of_different_sizes_are_predicted_roughly() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch.unsqueeze(-1).expand(-1, -1, WIDTH)).mean()  # type: ignore[no-any-return]

    def data() -> Any:
        found = [torch.zeros(length) for length in (20, 12, 17, 512)]
        return DataLoader(found, collate_fn=lambda samples: pad_sequence(samples, batch_first=True))  # type: ignore[arg-type]

    predicted = predict(data, loss, gpu="A100-40GB", batch_size=64)
    assert predicted.live_peak_bytes > 64 * 512 * 8 * WIDTH * 4
    assert "because samples differ in size" in predicted.basis
    assert predicted.high_bytes >= 1.5 * predicted.reserved_peak_bytes


def test_samples_that_do_not_go_together_are_refused_as_on_ranks() -> None:
    batches = Batches([torch.zeros(3), torch.zeros(4)])
    with pytest.raises(WorkloadError, match="The samples of a micro-batch differ in shape"):
        batches.of(2)
    assert batches.of(1).shape == (1, 4)
    assert batches.fixed


def loader() -> Any:
    return DataLoader(rows(), batch_size=3)  # type: ignore[arg-type]


class Empty:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class ReadyMade:
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(6, WIDTH), torch.zeros(6, dtype=torch.long))])


def test_the_datas_own_batch_size_is_that_of_the_prediction() -> None:
    assert predict(loader).settings.batch_size == 3
    assert predict(loader, batch_size=5).settings.batch_size == 5


def test_micro_batches_that_the_data_brings_keep_their_size() -> None:
    found = gm.predict(gm.Workload("mine", model, ReadyMade, mean_loss), gpu=["T4-16GB"])
    assert isinstance(found, ColdPredictions)
    assert found["t4-16gb"].settings.batch_size == 6
    assert found.largest == {"T4-16GB": None}
    assert "fixed by the data" in str(found)
    with pytest.raises(InvalidInput, match="batch_size=5 cannot be used: the data already comes in micro-batches"):
        predict(ReadyMade, batch_size=5)


def test_data_that_can_only_be_iterated_is_predicted() -> None:
    inputs = 4096 * WIDTH * 4  # without labels, which the loss alone has kept
    assert predict(Lines, batch_size=4096).categories["inputs"] == inputs
    assert predict(lambda: DataLoader(Lines(), batch_size=7)).settings.batch_size == 7


def missing() -> Any:
    raise FileNotFoundError("no such file: rows.csv")


def test_a_factory_that_ends_the_process_is_a_sentence() -> None:
    def ends() -> Any:
        raise SystemExit(0)

    with pytest.raises(WorkloadError, match="The data cannot be made: SystemExit: 0"):
        predict(ends)


def test_data_that_is_missing_is_a_sentence() -> None:
    with pytest.raises(WorkloadError, match=r"The data cannot be made.*FileNotFoundError: no such file: rows\.csv"):
        predict(missing)


def test_data_that_is_too_large_is_a_sentence() -> None:
    with pytest.raises(WorkloadError, match=r"A dry run may take at most 4\.0 GiB"):
        predict(lambda: torch.ones(2**31))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (iter([]), "can be iterated over only once"),
        (Empty(), "The data is empty"),
        (3, "has neither __len__ and __getitem__ nor __iter__"),
        ({"x": [1, 2]}, "does not hold tensors or arrays alone"),
        ((torch.zeros(2), torch.zeros(3)), "have different lengths"),
    ],
)
def test_data_that_ranks_refuse_is_refused(data: Any, sentence: str) -> None:
    with pytest.raises(GpumemError, match=sentence):
        Batches(data)


def test_tables_of_few_rows_are_enough() -> None:
    inputs, labels = Batches((torch.zeros(1, WIDTH), np.zeros(1))).of(9)
    assert (inputs.shape, labels.shape) == ((9, WIDTH), (9,))
