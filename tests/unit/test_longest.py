"""The largest sample of a dataset is found, named, and what micro-batches with it need is known beforehand."""

from __future__ import annotations

import gc
import time
import tracemalloc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gpumem_nb.engine.data import sizes
from gpumem_nb.engine.data.handed import as_dataset
from gpumem_nb.engine.data.sizes import Longest
from gpumem_nb.engine.data.stream import ShardedStream
from gpumem_nb.engine.step.trainer import Trainer
from gpumem_nb.memory.device import opened
from gpumem_nb.planning.fit import predicted, with_longest
from gpumem_nb.planning.prediction import FITS, TIGHT
from gpumem_nb.shared.forecast import RECORDED, VARYING, Forecast, Forecasts
from gpumem_nb.shared.messages import Failure, Reading
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import DataInfo, Workload
from tests.timing import HANG_S
from tests.unit.test_one_rank import alone as alone  # a fixture

MIB = 2**20
LIMIT = 1000 * MIB
READING = Reading(0, 0, 0, 0, None, LIMIT)
LENGTHS = [16 + 7 * index % 48 for index in range(400)]
LENGTHS[333] = 6000


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is held up sees fewer samples in a third of a second."""
    monkeypatch.setattr(sizes, "_LOOKED_AT_S", HANG_S)


class Texts(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((LENGTHS[index],), index % 50)


def pad(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def texts() -> DataLoader[Tensor]:
    return DataLoader(Texts(), batch_size=8, collate_fn=pad)


def next_word(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def stream() -> ShardedStream:
    one = ShardedStream(*as_dataset(texts())[:2], rank=0, size=1)
    one.varies = True
    return one


def test_the_longest_sample_is_found_wherever_it_is_and_named() -> None:
    found = Longest(Texts(), range(400))
    assert (found.index, found.all_seen) == (333, True)
    assert found.words.startswith("Sample 333 of the data has 6,00")
    assert found.among([1, 333, 5]) == found.words
    assert found.among([1, 2, 5]) == ""


def test_samples_that_are_alike_are_not_named_and_bad_ones_stop_nothing() -> None:
    assert Longest([torch.zeros(4)] * 50, range(50)).words == ""
    bad: list[Any] = [torch.zeros(4), None, torch.zeros(40)]
    bad[1] = property()
    assert Longest(bad, range(3)).index == 2


def test_of_many_samples_a_few_are_looked_at_and_no_list_of_all_is_made() -> None:
    class Many:
        def __getitem__(self, index: int) -> Tensor:
            return torch.zeros(4)

    order: Any = np.arange(10**6)
    tracemalloc.start()
    try:
        found = Longest(Many(), order)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (type(found.index), found.all_seen) == (int, False)
    assert most_bytes < 4 * MIB


@dataclass(slots=True)
class Slotted:
    text: Tensor


def test_samples_in_slots_have_their_size() -> None:
    assert Longest([Slotted(torch.zeros(4)), Slotted(torch.zeros(40))], range(2)).index == 1


def test_looking_draws_no_random_numbers() -> None:
    class Drawn(Texts):
        def __getitem__(self, index: int) -> Tensor:
            np.random.rand()
            return torch.rand(LENGTHS[index])

    def numbers() -> str:
        return repr(np.random.get_state())

    before = torch.get_rng_state(), numbers()
    Longest(Drawn(), range(400))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert numbers() == before[1]


def test_only_inside_micro_batches_are_of_the_longest_sample() -> None:
    data = stream()
    with data.of_longest():
        [batch] = data.micro_batches(4, 1)
        assert batch.shape == (4, 6000)
        assert not data.varies
    [batch] = data.micro_batches(4, 1)
    assert batch.shape[1] < 100
    assert data.varies


def test_a_forecast_knows_what_micro_batches_with_the_longest_sample_need() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50))

    trainer = Trainer(Workload("reader", model, texts, next_word), stream(), opened(), time.time())
    settings = Settings(batch_size=8, optimizer="sgd")
    found = trainer.trials.forecast(settings, [8, 16], [64], 0).of[0]
    logits = 4 * 64 * 6000 * 50
    assert found.how == VARYING
    assert found.live_peak_bytes - found.at_peak["other"] < logits / 3  # other: what other tests of this process hold
    assert found.high_bytes > 2 * logits
    assert "Sample 333" in found.sample
    of_failed_step = trainer.trials.forecast(settings, [8], [8], 0, longest=False).of[0]
    assert of_failed_step.longest_bytes is None


def test_where_a_small_step_of_the_longest_sample_does_not_fit_fewer_tell_what_it_needs() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50))

    device = opened()
    trainer = Trainer(Workload("reader", model, texts, next_word), stream(), device, time.time())
    settings, logits = Settings(batch_size=16, optimizer="sgd"), 4 * 16 * 6000 * 50
    gc.collect()  # what earlier tests left must not go in the middle
    device.empty_cache()  # in which others may have left room for less
    before = device.reading()
    device.set_limit(before.reserved_bytes + round(1.2 * logits))
    try:
        found = trainer.trials.forecast(settings, [16], [16], 0).of[0]
    finally:
        device.set_limit(before.limit_bytes)
    assert found.high_bytes > 3.5 * logits, "it is no lower bound"
    assert found.sample.endswith("or cap the tokens of a micro-batch.")


def said(mib: int, how: str = VARYING) -> Forecasts:
    one = Forecast(mib * MIB, mib * MIB, mib * MIB <= LIMIT, {}, "forward", "", how)
    return Forecasts(3, READING, 0.1, LIMIT, (one,), largest=mib, likely=mib)


def test_the_verdict_is_tight_where_only_the_longest_sample_does_not_fit() -> None:
    small = said(100).with_longest(said(1500, RECORDED), "Sample 333 is large.", all_seen=True)
    one = predicted(small.of[0], Settings(), LIMIT, None, "by hand", 0.0)
    assert (one.verdict, one.sample) == (TIGHT, "Sample 333 is large.")
    assert "Sample 333 is large" in str(one)
    whole = predicted(said(110).of[0], Settings(), LIMIT, None, "by hand", 0.0)
    assert whole.verdict == FITS
    assert with_longest(whole, one).verdict == TIGHT


def test_where_all_samples_were_seen_the_error_is_no_guess() -> None:
    small = said(700).with_longest(said(800, RECORDED), "", all_seen=True)
    assert predicted(small.of[0], Settings(), LIMIT, None, "by hand", 0.0).verdict == FITS
    small = said(700).with_longest(said(800, RECORDED), "", all_seen=False)
    assert predicted(small.of[0], Settings(), LIMIT, None, "by hand", 0.0).verdict == TIGHT


def test_the_longest_sample_that_does_not_even_fit_a_small_step_is_a_lower_bound() -> None:
    failure = Failure(0, "oom", "forward", "", asked_bytes=500 * MIB, free_bytes=100 * MIB)
    out = Forecasts(3, READING, 0.1, LIMIT, failure=failure, failed_batch=8)
    small = said(100).with_longest(out, "Sample 333 is large.", all_seen=True)
    assert small.of[0].high_bytes == 1400 * MIB
    library = replace(out, failure=replace(failure, asked_bytes=None))
    assert small.of[0].sample == "Sample 333 is large. A step of 8 of the largest runs out of memory."
    silent = said(100).with_longest(library, "Sample 333 is large.", all_seen=True)
    assert predicted(silent.of[0], Settings(), LIMIT, None, "by hand", 0.0).verdict == TIGHT, "it ran out all the same"
    assert Forecasts(3, READING, 0.1, LIMIT, largest=64).with_longest(out, "", all_seen=True) == out
    broken = Forecasts(3, READING, 0.1, LIMIT, failure=Failure(0, "error", "forward", "no"), failed_batch=8)
    assert said(100).with_longest(broken, "", all_seen=True) == said(100)


def test_of_micro_batches_that_the_data_bring_no_sample_can_be_told() -> None:
    data = stream()
    data.info = DataInfo(batched=True, batch_size=8)
    assert data.longest() is None
    assert data.large_sample(Settings(batch_size=8)) == ""
