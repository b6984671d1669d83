"""What steps and cells leave in circles is in no answer to a question, and does not stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumem_nb.engine import cells
from gpumem_nb.memory.device import opened
from gpumem_nb.shared.settings import Settings
from tests.unit.test_one_rank import alone as alone  # a fixture
from tests.unit.test_questions_change_nothing import WIDTH, forecast, train, trainer_of
from tests.unit.test_questions_change_nothing import forgetful as forgetful  # a fixture


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    """As on a rank."""
    gc.unfreeze()
    yield
    gc.freeze()


def in_a_circle(mib: int) -> SimpleNamespace:
    made = SimpleNamespace(memory=torch.zeros(mib << 18))
    made.itself = made
    return made


class Littering(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        in_a_circle(4)
        return super().forward(x)


class Holding(nn.Linear):
    """Holds something in a circle, from one step to the next."""

    held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.held = in_a_circle(4)
        return super().forward(x)


@pytest.mark.full
def test_what_steps_hold_in_circles_does_not_add_up_over_questions() -> None:
    trainer, settings = trainer_of(None, model=lambda: Holding(WIDTH, WIDTH)), Settings(batch_size=2)
    found: list[tuple[int, int]] = []
    for _ in range(4):
        train(trainer, 3, settings)
        found.append((forecast(trainer, settings).live_peak_bytes, opened().reading().live_bytes))
    assert max(found)[0] - min(found)[0] < 2**20
    assert max(live for _, live in found) - found[0][1] < 2**20


def test_garbage_of_steps_and_of_cells_is_in_no_answer_and_does_not_stay() -> None:
    trainer, device = trainer_of(None, model=lambda: Littering(WIDTH, WIDTH)), opened()
    at_first, settings = device.reading().live_bytes, Settings(batch_size=2)
    held = [in_a_circle(64)]
    train(trainer, 1, settings)
    before = forecast(trainer, settings).live_peak_bytes
    held.clear()
    cells.one_more()
    for _ in range(3):
        train(trainer, 3, settings)
        assert forecast(trainer, settings).live_peak_bytes < before - (60 << 20)
        assert device.reading().live_bytes < at_first + (1 << 20)
