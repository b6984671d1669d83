"""Objects that other libraries made or wrapped: taken apart, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from gpumem_nb.engine.step.checks import checked_model, checked_optimizer
from gpumem_nb.engine.step.parts import Parts
from gpumem_nb.engine.trainers.prepared import unprepared
from gpumem_nb.shared.errors import WorkloadError


class Unbuilt(Optimizer):
    """Around another optimizer, and none itself."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups


class Dense(nn.Linear):
    """Passes for a layer of Keras, which with torch below it is a module of torch's, too."""


Dense.__module__ = "keras.src.layers.core.dense"

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "max_norm": (
        lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)),
        r"Embedding \(0\) has max_norm=1: .* the ranks' weights come apart. Leave max_norm out",
    ),
    "max_norm of bags": (lambda: nn.EmbeddingBag(4, 2, max_norm=0.5), r"EmbeddingBag \(the model itself\)"),
    "Keras": (lambda: nn.Sequential(Dense(4, 2)), r"Dense \(0\) is a Keras layer.* torch.nn modules"),
    "torch.jit": (
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(4, 2), torch.ones(1, 4))),
        r"Linear \(0\) was compiled by torch.jit",
    ),
    "accelerate's precision": (
        lambda: Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(4, 2)),
        "of this Linear in a precision of its own.* accelerator.unwrap_model",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_would_not_train_as_it_says_is_refused(what: str) -> None:
    make, sentence = REFUSED[what]
    with pytest.raises(WorkloadError, match=sentence):
        checked_model(make())


def test_an_optimizer_that_is_none_itself_is_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(
        WorkloadError, match=r"Unbuilt passes for an optimizer without being one.* Attach the optimizer"
    ):
        checked_optimizer(Unbuilt(SGD(model.parameters(), lr=0.1)), Parts(model, nn.MSELoss()))


def test_what_accelerate_prepared_is_taken_as_what_it_was_given() -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=4, shuffle=True)
    prepared = Accelerator(cpu=True).prepare(model, optimizer, scheduler, loader)
    found = [unprepared(value) for value in prepared]
    assert found[:3] == [model, optimizer, scheduler]
    assert type(found[3]) is DataLoader
    assert found[3].dataset is loader.dataset
    assert unprepared(loader) is loader
