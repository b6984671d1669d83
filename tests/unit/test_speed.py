"""Throughput of two configurations is compared only as far as single steps allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpumem_nb.report.configurations import Effect, Tried
from gpumem_nb.report.speed import FEWEST_STEPS, Speed, Straggler, compared, of_first_step
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.step_times import FORWARD, StepTimes
from tests.ledgers import sample, waits


def noisy(median: float, steps: int, spread: float = 0.1) -> Speed:
    found = Speed.of(list(median * np.random.default_rng(1).normal(1, spread, steps)))
    assert found
    return found


def test_two_steps_say_nothing() -> None:
    early = compared(noisy(100, 50), noisy(325, 2))
    assert f"too early to tell: 2 of {FEWEST_STEPS} steps" in early
    assert "%" not in early
    assert compared(noisy(100, 50), None).endswith("→ n/a samples/s")


def test_a_difference_within_the_noise_is_called_none() -> None:
    assert "no clear difference" in compared(noisy(100, 20, 0.2), noisy(103, 20, 0.2))
    assert "no clear difference" not in compared(noisy(100, 50, 0.02), noisy(103, 50, 0.02))
    assert "+50 %" in compared(noisy(100, 20), noisy(150, 20))
    assert "−33 %" in compared(noisy(150, 20, 0.01), noisy(100, 20, 0.01))


def test_of_a_busy_machine_only_what_waiting_for_cores_cannot_explain_is_a_difference() -> None:
    def busy(speed: Speed, share: float) -> Speed:
        return replace(speed, starved=share)

    slow, fast = noisy(100, 50, 0.02), noisy(200, 50, 0.02)
    said = compared(busy(slow, 0.2), busy(fast, 0.3))
    assert "at least +60 %, though ranks waited for a core in 30 % of a step" in said
    assert "at least −38 %" in compared(fast, busy(slow, 0.2)), "125 of 200"
    for before, after in ((busy(slow, 0.6), fast), (fast, busy(slow, 0.6)), (busy(slow, 1.0), fast)):
        assert "not comparable: machine busy" in compared(before, after)
    assert "not comparable" in compared(slow, Speed(90, 89, 91, 50, 0.2)), "with cores it might be faster"


@pytest.mark.parametrize("waiting", [0.6, 0.8, 1.0])
def test_what_some_steps_lost_to_waiting_is_given_back_to_these_steps(waiting: float) -> None:
    def ran(samples_per_s: float, share: float) -> Tried:
        tried = Tried(1, "w", Settings())
        for step in range(32):
            waits = share if step % 10 < 10 * waiting else 0.0
            times = StepTimes.of({FORWARD: 0.1}, None, queued_s=0.1 * waits)
            tried.add([sample(step, samples_per_s=samples_per_s * (1 - waits), times=times)])
        return tried

    busy, slower, faster = ran(100, 0.5), ran(90, 0.0), ran(150, 0.0)
    assert "50 → 90 samples/s (not comparable: machine busy" in Effect(busy, slower).speed, "100 with cores"
    assert "50 → 150 samples/s (at least +50 %, though ranks waited for a core in 50 %" in Effect(busy, faster).speed


def test_a_speed_with_cores_is_as_uncertain_as_what_it_follows_from() -> None:
    before, after = noisy(10, 20, 0.2), noisy(106, 20, 0.01)
    assert "not comparable" in compared(replace(before, starved=0.9), after), "100 ± 10"


def test_equal_speeds_are_told_apart_as_seldom_as_their_error_says() -> None:
    rng = np.random.default_rng(0)
    said = [compared(*(Speed.of(list(rng.normal(100, 8, 30))) for _ in range(2))) for _ in range(400)]
    wrong = sum("no clear difference" not in one for one in said) / len(said)
    assert wrong < 0.1, "two standard errors: 5 % of the time, and the quartiles are estimated too"


def test_what_warms_up_is_not_judged_and_what_was_settled_stays() -> None:
    before, after = Tried(1, "w", Settings()), Tried(2, "w", Settings(precision="bf16"))
    for tried, speed in ((before, 100.0), (after, 50.0)):
        for step in range(10):
            tried.add([sample(step, 0, samples_per_s=1.0 if step < 2 else speed)])
    effect = Effect(before, after)
    shown = effect.speed
    assert "100 → 50 samples/s (−50 %" in shown
    before.settle()
    assert effect.speed == shown
    assert before.samples_per_s == pytest.approx(100)


@pytest.mark.parametrize("tried_before", [False, True])
def test_the_first_step_of_all_is_no_throughput(tried_before: bool) -> None:
    tried = Tried(1, "w", Settings())
    for step in range(1 if tried_before else 4):
        first = step == 0
        tried.add([sample(step, rank, samples_per_s=1.0 if first else 50.0, first=first) for rank in range(2)])
    assert tried.steps
    assert tried.samples_per_s == (None if tried_before else 100)
    assert len(tried.curve) == tried.steps, "its loss counts"


def test_a_first_step_that_took_long_is_told() -> None:
    steps = [sample(step, 0, step_s=8.2 if step == 1 else 0.4, first=step == 1) for step in range(1, 6)]
    assert of_first_step(steps) == (
        "The first step took 8.2 s, 7.8 s more than later ones: kernels are loaded and memory is allocated in it. "
        "It counts in no samples/s."
    )
    assert "so no samples/s follow from it" in of_first_step(steps[:1])
    assert not of_first_step(steps[1:])
    assert not of_first_step([sample(step, 0, step_s=0.4, first=step == 1) for step in range(1, 6)])
    under_others = [sample(step, 0, step_s=0.4, settings_id=2) for step in range(2, 6)]
    assert not of_first_step([*steps[:1], *under_others]), "which may take less for another reason"


def waiting(*shares: float | None, steps: int = FEWEST_STEPS) -> Straggler | None:
    """Of ranks that wait for these shares of each step."""
    return Straggler.of(
        [
            [sample(step, rank, times=None if share is None else waits(share * 0.1)) for step in range(steps)]
            for rank, share in enumerate(shares)
        ]
    )


def test_the_rank_that_waits_least_is_named_if_the_others_wait_much_longer() -> None:
    assert str(waiting(0.4, 0.5, 0.02, 0.45)) == "rank 2 is slowest, others wait 43 %"
    assert str(waiting(0.1, 0.4)) == "rank 0 is slowest, others wait 30 %"
    assert waiting(0.30, 0.32, 0.25, 0.31) is None
    assert waiting(0.1, 0.4, steps=FEWEST_STEPS - 1) is None, "too few steps"
    assert waiting(0.1, None) is None, "GPUs do not say"
    assert waiting(0.1) is None, "nobody waits for a single rank"
    assert waiting() is None


def test_a_step_in_which_blocks_were_compiled_is_told_and_counts_in_no_throughput() -> None:
    steps = [
        sample(step, 0, step_s=31.2 if step == 4 else 0.4, compile_s=30.9 if step == 4 else 0.0) for step in (3, 4)
    ]
    assert of_first_step(steps) == (
        "Step 4 took 31.2 s, of which compile=blocks compiled for 30.9 s. It counts in no samples/s."
    )
    tried = Tried(1, "w", Settings())
    tried.add(steps[1:])
    assert tried.samples_per_s is None
