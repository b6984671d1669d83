"""The largest batches of cold predictions: looked for after everything else, and never at its cost."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gpumem_nb as gm
from gpumem_nb.planning import dry_process
from gpumem_nb.planning.cold_table import ColdPredictions
from gpumem_nb.planning.prediction import FITS, Prediction
from tests.timing import HANG_S
from tests.unit.dry_runs import apart

pytestmark = pytest.mark.usefixtures("dry_runs_forked")
WIDTH, BATCH = 256, 32
GPUS = ("T4-16GB", "V100-16GB", "A100-40GB")  # the first two without the third's kernels


def rows() -> list[Tensor]:
    return [torch.zeros(WIDTH)] * 8


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


Loss = Callable[[nn.Module, Tensor], Tensor]


def workload(loss: Loss) -> gm.Workload:
    return gm.Workload("mine", encoder, rows, loss)


def predict(loss: Loss) -> ColdPredictions:
    found = gm.predict(workload(loss), gpu=list(GPUS), batch_size=BATCH)
    assert isinstance(found, ColdPredictions)
    return found


def check_verdicts(found: ColdPredictions) -> None:
    """As they are where nobody asks for the largest batch."""
    assert found.fitting == GPUS
    for one in found.by_gpu.values():
        assert "from a step on fake tensors" in one.basis
        assert "CPU" not in one.basis


def check_unknown(found: ColdPredictions, why: str) -> None:
    check_verdicts(found)
    assert set(found.largest.values()) == {None}
    assert all(why in found.unknown[gpu] for gpu in GPUS)
    for text in (str(found), found._repr_html_()):
        assert text.count("not known") == len(GPUS) + 1  # a cell each, and why
        assert f"Largest batch of {', '.join(GPUS)} not known: " in text
        assert "fixed by the data" not in text


def check_largest(found: ColdPredictions, loss: Loss, gpu: str) -> None:
    """It fits, and one sample more does not surely."""
    largest = found.largest[gpu]
    assert largest
    there, beyond = (gm.predict(workload(loss), gpu=gpu, batch_size=size) for size in (largest, largest + 1))
    assert isinstance(there, Prediction)
    assert isinstance(beyond, Prediction)
    assert there.verdict == FITS
    assert beyond.verdict != FITS


def test_a_model_that_is_bound_to_its_batch_size_keeps_its_verdicts() -> None:
    """As SimCLR's loss with a mask that was made for one batch size."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        return nn.functional.cross_entropy(out @ out.t(), torch.arange(BATCH))

    check_unknown(predict(loss), "With another batch_size: The forward cannot be run without memory: ValueError")


def test_a_search_takes_no_steps_on_the_cpu() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) > BATCH:
            raise ValueError("too many")
        return model(batch).mean()  # type: ignore[no-any-return]

    check_unknown(predict(loss), "ValueError: too many")


@pytest.mark.full
def test_a_search_that_does_not_end_takes_no_verdict_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(HANG_S * (len(batch) > BATCH))
        return model(batch).mean()  # type: ignore[no-any-return]

    monkeypatch.setattr(dry_process, "SEARCH_S", 0.2)
    began_s = time.monotonic()
    with apart():
        check_unknown(predict(loss), "It was not found within 120 s")
    assert time.monotonic() - began_s < HANG_S


@pytest.mark.full
def test_a_process_that_dies_in_a_search_takes_no_verdict_away() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) > BATCH:
            os._exit(3)
        return model(batch).mean()  # type: ignore[no-any-return]

    with apart():
        check_unknown(predict(loss), "It was not found within 120 s")


@pytest.mark.full
def test_a_process_that_crashes_while_it_ends_has_answered() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) == BATCH:
            atexit.register(os.abort)
        return model(batch).mean()  # type: ignore[no-any-return]

    with apart():
        found = predict(loss)
    check_verdicts(found)
    assert all(found.largest.values())


@pytest.mark.full
def test_what_grows_with_the_square_of_the_batch_fits_where_it_is_said_to() -> None:
    """As the scores of CLIP and SimCLR, of each sample with each other."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        return nn.functional.cross_entropy(out @ out.t(), torch.arange(len(batch)))

    found = predict(loss)
    check_verdicts(found)
    check_largest(found, loss, "T4-16GB")
    check_largest(found, loss, "A100-40GB")


@pytest.mark.full
def test_a_loss_that_loops_over_samples_has_a_largest_batch_that_fits() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        wide = batch.unsqueeze(1).expand(-1, 2**18, -1)
        return torch.stack([model(sample).mean() for sample in wide]).mean()

    found = predict(loss)
    check_verdicts(found)
    check_largest(found, loss, "V100-16GB")
