"""How long steps of many micro-batches are said to take, from a few steps of one and two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpumem_nb.engine.step import trials
from gpumem_nb.engine.step.update_times import UpdateTimes
from gpumem_nb.shared.messages import Chunk, Failure
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.step_times import UPDATE, StepTimes
from tests.ledgers import sample


@contextmanager
def _trying(chunk: Chunk) -> Iterator[Failure | None]:
    yield None


@pytest.mark.parametrize(("micro_batch_s", "count"), [(0.01, 16), (0.9, 16), (3.0, 4)])
def test_warming_up_counts_once_however_many_micro_batches_there_are(
    micro_batch_s: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    taken: list[int] = []

    def step(failure: Failure | None, chunk: Chunk) -> tuple[float, float, Failure | None]:
        nonlocal now_s
        warming_up_s = 0.0 if taken else 0.4
        taken.append(chunk.settings.accumulation_steps)
        took_s = 0.002 + chunk.settings.accumulation_steps * micro_batch_s + warming_up_s
        now_s += took_s
        return took_s, 0.0, None

    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: now_s))
    chunk = Chunk(Settings(accumulation_steps=count), 1, 1, trial=True)
    seconds, failure = trials.timed(_trying, step, chunk)
    assert failure is None
    assert seconds == pytest.approx([0.002 + count * micro_batch_s] * len(seconds))
    assert set(taken) == {1, 2}, "no whole step was taken"


@pytest.mark.parametrize(("fewest", "expected"), [(1, 8.4), (trials.FEWEST_ON_GPU, 0.4)])
def test_on_a_gpu_a_step_that_loads_kernels_is_not_the_only_one(
    fewest: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    took_s = iter([8.4, *[0.4] * 9])
    now_s = 0.0

    def step(failure: Failure | None, chunk: Chunk) -> tuple[float, float, Failure | None]:
        nonlocal now_s
        now_s += (took := next(took_s))
        return took, 0.0, None

    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: now_s))
    seconds, failure = trials.timed(_trying, step, Chunk(Settings(), 1, 1, trial=True), fewest)
    assert (failure, seconds) == (None, (expected,))


def test_bytes_that_updates_go_through_are_those_of_the_weights_that_there_are() -> None:
    times, settings = UpdateTimes(), {name: Settings(optimizer=name) for name in ("sgd", "adam")}

    def update(name: str, weights: list[Tensor]) -> None:
        live: Any = SimpleNamespace(settings=settings[name], parameters=weights, optimizer=SimpleNamespace(state={}))
        times.note(live, [sample(step, times=StepTimes.of({UPDATE: 0.1}, None)) for step in range(3)])

    few, many = [torch.zeros(10)], [torch.zeros(1000)]
    for weights in (few, many):  # a cell has added some
        for name in settings:
            update(name, weights)
    assert times.scaled(2 * 4 * 1000) == pytest.approx(0.1)
    assert times.scaled(2 * 4 * 10) == pytest.approx(0.001), "no update is known that goes through so few"
