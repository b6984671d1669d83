"""Live bytes at step boundaries: what is growth and what is not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

import pytest

from gpumem_nb.memory.leaks.detector import Growth
from tests.timing import slowness

REST = 10_000_000


def follow(live: Iterable[int], chunk_steps: int = 10) -> tuple[Growth, int | None]:
    """After how many steps growth was seen in a series of live bytes."""
    growth = Growth()
    growth.chunk_begins(REST)
    for step, now in enumerate(live, 1):
        growth.step_ended(now)
        if growth.every:
            return growth, step
        if step % chunk_steps == 0:
            growth.chunk_begins(now)
    return growth, None


@pytest.mark.parametrize("size", [4, 512, 3 * 2**20])
def test_what_every_step_keeps_is_seen_within_30_steps(size: int) -> None:
    growth, step = follow(REST + step * size for step in range(50))
    assert step is not None
    assert step <= 30
    assert growth.every == 1
    assert growth.bytes_per_step == pytest.approx(size)
    assert growth.bytes_so_far == pytest.approx(step * size, rel=0.25)


def test_what_every_second_step_keeps_is_seen_within_50_steps() -> None:
    _, step = follow(REST + step // 2 * 1000 for step in range(50))
    assert step is not None


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.7, 0.95])
def test_a_number_kept_at_each_step_is_seen_through_horovods_votes(share: float) -> None:
    for seed in range(50):
        dice = random.Random(seed)
        _, step = follow(REST + step * 4 + 16 * (dice.random() < share) for step in range(35))
        assert step is not None, seed


def test_a_leak_is_seen_through_batches_of_varying_length_that_a_model_keeps() -> None:
    dice = random.Random(1)
    growth, step = follow(REST + step * 1000 + dice.randrange(3000) for step in range(400))
    assert step is not None
    assert growth.bytes_per_step == pytest.approx(1000, rel=0.2)


def warm_up() -> list[int]:
    return [REST + 1000 * min(step, 8) for step in range(500)]


def batches_of_varying_length() -> list[int]:
    dice = random.Random(2)
    return [REST + dice.randrange(1_000_000) for _ in range(5000)]


def garbage_in_circles() -> list[int]:
    return [REST + step % 14 * 4000 for step in range(2000)]


def votes_on_their_way() -> list[int]:
    dice = random.Random(4)
    return [REST + 16 * dice.randrange(3) for _ in range(5000)]


def accumulation_that_alternates() -> list[int]:
    return [REST + (step // 25 % 2) * 400_000 for step in range(2000)]


@pytest.mark.parametrize(
    "series",
    [
        warm_up,
        batches_of_varying_length,
        garbage_in_circles,
        votes_on_their_way,
        accumulation_that_alternates,
    ],
)
def test_what_varies_and_comes_back_is_no_growth(series: Callable[[], list[int]]) -> None:
    assert follow(series())[1] is None


def test_what_cells_allocate_between_chunks_is_no_growth() -> None:
    growth = Growth()
    for chunk in range(200):
        growth.chunk_begins(REST + chunk * 1000)
        growth.step_ended(REST + chunk * 1000)
        assert not growth.every


def test_a_flip_is_no_growth_and_hides_none() -> None:
    growth, live = Growth(), REST
    growth.chunk_begins(live)
    for step in range(60):
        if step % 10 == 0:
            growth.settle()
            live += 1_000_000
        live += 100
        growth.step_ended(live)
    assert growth.every == 1
    assert growth.bytes_per_step == pytest.approx(100)


def test_watching_costs_microseconds() -> None:
    growth = Growth()
    growth.chunk_begins(REST)
    began_s = time.thread_time()
    for step in range(10_000):
        growth.step_ended(REST + step % 7)
    assert (time.thread_time() - began_s) / 10_000 < 20e-6 * slowness()
