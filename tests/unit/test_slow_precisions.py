"""A precision that is many times slower is left out, and only for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from gpumem_nb.kernel.questions.fitting import SlowPrecisions
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, Prediction
from gpumem_nb.shared.errors import NotThisTime
from gpumem_nb.shared.settings import Settings
from tests.unit.tuned_machine import said_of

LIMIT = 1000
Step = tuple[float, str] | Exception


class Steps:
    """Takes no steps, but says what was planned for each."""

    def __init__(self, **planned: Sequence[Step]) -> None:
        self._planned = {precision: list(steps) for precision, steps in planned.items()}
        self.sizes: list[int] = []

    def by_small_steps(self, settings: Settings, sizes: list[int], budget_bytes: int | None) -> list[Prediction]:
        self.sizes += sizes
        step = self._planned[settings.precision].pop(0)
        if isinstance(step, Exception):
            raise step
        return [replace(said_of(settings, 1, LIMIT), seconds=step[0], verdict=step[1])]


def slow(steps: Steps, batch_size: int = 8, batched: bool = False) -> SlowPrecisions:
    return SlowPrecisions(cast(Any, steps), Settings(batch_size=batch_size), batched)


FP32, BF16 = Settings(batch_size=8), Settings(batch_size=32, precision="bf16")


def test_one_that_is_slow_twice_is_left_out() -> None:
    precisions = slow(Steps(fp32=[(0.5, FITS)], bf16=[(9.0, FITS), (5.0, FITS)]))
    assert precisions.why(FP32) == ""
    said = "a small step took 10 times as long as in another precision"
    assert precisions.why(BF16) == said
    assert precisions.why(BF16) == said, "and not asked again"


def test_one_that_was_slow_once_is_not() -> None:
    precisions = slow(Steps(fp32=[(0.5, FITS)], bf16=[(9.0, FITS), (0.6, FITS)]))
    assert [precisions.why(FP32), precisions.why(BF16), precisions.why(BF16)] == [""] * 3


def test_a_step_that_ran_out_of_memory_says_nothing_of_time() -> None:
    precisions = slow(Steps(fp32=[(0.01, DOES_NOT_FIT)], bf16=[(2.0, FITS), (2.0, FITS)]))
    assert [precisions.why(FP32), precisions.why(BF16)] == ["", ""]


def test_all_are_tried_with_as_many_samples() -> None:
    steps = Steps(fp32=[(0.5, FITS)], bf16=[(0.5, FITS)])
    precisions = slow(steps, batch_size=2)
    precisions.why(FP32.replace(batch_size=2))
    precisions.why(BF16)
    assert steps.sizes == [2, 2]


def test_after_a_second_step_that_failed_it_is_asked_again() -> None:
    steps = Steps(fp32=[(0.5, FITS)], bf16=[(9.0, FITS), NotThisTime("later"), (9.0, FITS), (9.0, FITS)])
    precisions = slow(steps)
    precisions.why(FP32)
    with pytest.raises(NotThisTime):
        precisions.why(BF16)
    assert "18 times" in precisions.why(BF16)
