"""Training on one rank: data through the trainer, whoever fetches it."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpumem_nb.engine import building
from gpumem_nb.engine.link.communicator import here
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.kernel import compatibility
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.messages import Chunk, ChunkReply
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Workload
from tests.unit.test_one_rank import alone as alone
from tests.unit.test_one_rank import tried


class Augmented(Dataset[Tensor]):
    """Draws from all three libraries."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        return noise + index


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = model(batch)
    return output.square().mean()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(here(), "size", 1)
    trainers: list[Trainer] = []

    def trainer(data: Any, loss: Any = loss, eval_data: Any = None) -> Trainer:
        held_out = None if eval_data is None else lambda: eval_data
        prepared = building.prepare(lambda: Workload("small", dropping, lambda: data, loss, eval_data=held_out))
        assert prepared is not None
        built = building.build(*prepared[:2], opened(), time.time(), prepared[2])
        assert built is not None
        trainers.append(built)
        return built

    yield trainer
    for one in trainers:
        one.close()


def trained(trainer: Trainer, settings: Settings, settings_id: int, steps: int, **options: Any) -> ChunkReply:
    reply = trainer.run(Chunk(settings, settings_id, steps, **options))
    assert reply.failure is None, reply.failure
    return reply


def losses(reply: ChunkReply) -> list[float | None]:
    return [sample.loss for sample in reply.samples]


def test_losses_do_not_depend_on_workers_flips_trials_or_undone_steps(make: Any) -> None:
    plain = Settings(batch_size=3)
    expected = losses(trained(make(Augmented()), plain, 1, 14))
    trainer, found = make(Augmented()), []
    for settings_id, workers in enumerate((0, 2, 1, 0, 2), 1):
        settings = plain.replace(num_workers=workers)
        found += losses(trained(trainer, settings, settings_id, 2, ledger_steps=1))
        assert tried(trainer, settings.replace(batch_size=5)) is None
        trainer.record()
    found += losses(trained(trainer, plain, 6, 4))
    assert found == expected


def first_alone(samples: list[Tensor]) -> Tensor:
    return samples[0]


@pytest.mark.parametrize("how", [{"batch_size": None}, {"batch_size": 1, "collate_fn": first_alone}])
def test_a_loss_that_changes_its_micro_batch_in_place_leaves_the_data_alone(make: Any, how: dict[str, Any]) -> None:
    def scaling(model: nn.Module, batch: Tensor) -> Tensor:
        return loss(model, batch.div_(255))

    kept = [torch.rand(how["batch_size"] or 2, 4) for _ in range(6)]
    data: DataLoader[Tensor] = DataLoader(kept, **how)  # type: ignore[arg-type]
    before = [batch.clone() for batch in kept]
    trainer = make(data, scaling, data if how["batch_size"] else None)
    settings = compatibility.adapted(Settings(), trainer.info())
    trained(trainer, settings, 1, 3, evaluate=how["batch_size"] is not None)
    assert tried(trainer, settings) is None
    assert all(map(torch.equal, kept, before))


def test_a_micro_batch_that_was_copied_is_let_go_before_it_is_trained(make: Any) -> None:
    made: list[weakref.ref[Tensor]] = []
    left: list[int] = []

    def noted(samples: list[Tensor]) -> Tensor:
        batch = torch.stack(samples)
        made.append(weakref.ref(batch))
        return batch

    def counting(model: nn.Module, batch: Tensor) -> Tensor:
        left.append(sum(one() is not None for one in made))
        return loss(model, batch)

    trainer = make(DataLoader(Augmented(), batch_size=2, collate_fn=noted), counting)
    trained(trainer, Settings(batch_size=2, accumulation_steps=2), 1, 2)
    assert left == [0] * 4


def test_what_a_loader_says_becomes_the_first_settings(make: Any) -> None:
    loader = DataLoader(Augmented(), batch_size=5, num_workers=1, prefetch_factor=4)
    info = make(loader).info()
    adapted = compatibility.adapted(Settings(), info)
    assert (adapted.batch_size, adapted.num_workers, adapted.prefetch_factor) == (5, 1, 4)
    with pytest.raises(InvalidInput, match="pin_memory=on has no effect on virtual GPUs"):
        compatibility.check(adapted.replace(pin_memory=True), info, 1)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.rand(4)


def test_an_iterable_has_no_length_and_no_workers(make: Any) -> None:
    info = make(Endless()).info()
    assert info.dataset_len is None
    settings = compatibility.within_dataset(compatibility.adapted(Settings(num_workers=2), info), info, 1)
    assert settings.num_workers == 0
    compatibility.check(settings, info, 1)
    with pytest.raises(InvalidInput, match="num_workers=2 cannot be used: data that can only be iterated"):
        compatibility.check(settings.replace(num_workers=2), info, 1)
    expected = losses(trained(make(Endless()), settings, 1, 4))
    trainer = make(Endless())
    found = losses(trained(trainer, settings, 1, 2))
    assert tried(trainer, settings.replace(batch_size=50)) is None
    trainer.record()
    assert found + losses(trained(trainer, settings, 1, 2)) == expected


def test_ready_made_batches_keep_their_size(make: Any) -> None:
    batches = [torch.full((6, 4), float(number)) for number in range(5)]
    trainer = make(DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    info = trainer.info()
    settings = compatibility.within_dataset(compatibility.adapted(Settings(), info), info, 1)
    assert settings.batch_size == 6
    assert info.dataset_len is None
    with pytest.raises(InvalidInput, match="batch_size=8 cannot be used: the data already comes in micro-batches"):
        compatibility.check(settings.replace(batch_size=8), info, 1)
    trained(trainer, settings, 1, 5)
    assert trainer.stream.epoch == 1.0


def test_a_bad_sample_fails_its_step_and_names_itself_or_is_skipped_and_told(make: Any) -> None:
    class Sevens(Augmented):
        def __getitem__(self, index: int) -> Tensor:
            if index == 7:
                raise OSError("unreadable")
            return super().__getitem__(index)

    trainer = make(Sevens())
    reply = trainer.run(Chunk(Settings(batch_size=23), 1, 1))
    assert reply.failure is not None
    assert reply.failure.phase == "data"
    assert reply.failure.message.startswith("sample 7 of the data failed: OSError: unreadable. ")
    reply = trained(trainer, Settings(batch_size=23, on_bad_sample="skip"), 2, 2)
    assert reply.notes == ("sample 7 of the data failed: OSError: unreadable",)


def test_data_that_differs_is_refused_and_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def another_rank_has_more(own: list[int], about: str) -> list[list[int]]:
        return [list(own), [own[0] + 1, *own[1:]]]

    monkeypatch.setattr(here(), "numbers", another_rank_has_more)
    with pytest.raises(WorkloadError, match="rank 0 has 23 samples, rank 1 has 24"):
        building.prepare(lambda: Workload("small", dropping, Augmented, loss))
