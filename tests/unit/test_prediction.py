"""Steps scaled from small ones, replayed, and judged: on traces made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpumem_nb.memory.ledger.trace import CODE, Trace
from gpumem_nb.memory.prediction import SmallSteps, forecast, largest
from gpumem_nb.memory.virtual_gpu.gpu import NOTHING_HELD
from gpumem_nb.planning.fit import verdict, worst
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, NO_LIMIT, TIGHT
from gpumem_nb.shared.allocator_settings import DEFAULT, AllocatorSettings
from gpumem_nb.shared.categories import (
    ACTIVATIONS,
    INPUTS,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    TEMPORARIES,
)
from gpumem_nb.shared.forecast import BY_OPERATORS, BY_PEAKS, RECORDED, SCALED, VARYING, Forecast
from gpumem_nb.shared.settings import Settings

MIB = 2**20


def trace(batch_size: int, scratch: int = 1) -> Trace:
    """Weights of 1 MiB; activations of 1 MiB a sample, scratch in one operator, then a temporary of 20 MiB."""
    size = [MIB, batch_size * MIB, *[batch_size * MIB // 4] * scratch, 20 * MIB]
    inside = list(range(3, 3 + scratch))
    last = 3 + scratch
    event = [2, *[sign * one for one in inside for sign in (1, -1)], -2, last, -last]
    return Trace(
        batch_size=batch_size,
        size=np.array(size),
        category=np.array([CODE[PARAMETERS], CODE[ACTIVATIONS], *[CODE[TEMPORARIES]] * (scratch + 1)]),
        before=np.array([True, *[False] * (scratch + 2)]),
        call=np.array([0, 1, *[2] * scratch, 0]),
        scratch=np.array([False, False, *[True] * scratch, False]),
        event=np.array(event),
        phase=np.array([0] * (2 * scratch + 2) + [1, 1]),
        module=np.zeros(len(event), dtype=np.int64),
        phases=("forward", "update"),
        modules=("net",),
        foreign_bytes=0,
        rest_bytes=0,
        missing_bytes=0,
        number=np.arange(len(size)) + 1,
        layout=NOTHING_HELD,
        held_foreign_bytes=0,
        allocator=DEFAULT,
    )


def test_a_step_of_that_very_size_is_taken_as_it_is() -> None:
    found = forecast(SmallSteps([trace(2)]), 2, None)
    assert (found.how, found.live_peak_bytes, found.phase) == (RECORDED, 21 * MIB, "update")
    assert found.at_peak == {PARAMETERS: MIB, TEMPORARIES: 20 * MIB}


def test_the_peak_of_a_larger_step_may_lie_elsewhere_than_that_of_the_small_ones() -> None:
    found = forecast(SmallSteps([trace(2), trace(4)]), 64, None)
    assert (found.how, found.live_peak_bytes, found.phase) == (SCALED, (1 + 64 + 16) * MIB, "forward")
    assert found.reserved_peak_bytes >= found.live_peak_bytes


def test_operators_that_ask_more_often_in_larger_steps_are_taken_as_a_whole() -> None:
    found = forecast(SmallSteps([trace(2, scratch=1), trace(4, scratch=3)]), 64, None)
    assert (found.how, found.live_peak_bytes) == (BY_OPERATORS, (1 + 64 + 16) * MIB)


@pytest.mark.parametrize("batch_size", [2, 4])
def test_small_steps_whose_operators_are_taken_as_a_whole_are_still_known_by_themselves(batch_size: int) -> None:
    scratch = {2: 3, 4: 2}
    both = forecast(SmallSteps([trace(size, scratch[size]) for size in scratch]), batch_size, 100 * MIB)
    assert both == forecast(SmallSteps([trace(batch_size, scratch[batch_size])]), batch_size, 100 * MIB)


def test_calls_are_found_again_where_putting_samples_together_takes_a_call_for_each() -> None:
    large = trace(4, scratch=3)
    large = replace(large, call=np.where(large.call > 0, large.call + 2, 0))
    found = forecast(SmallSteps([trace(2), large]), 64, None)
    assert (found.how, found.live_peak_bytes) == (BY_OPERATORS, (1 + 64 + 16) * MIB)


def test_what_other_threads_let_go_of_in_the_middle_of_a_step_does_not_matter() -> None:
    large = trace(4)
    late = replace(large, event=large.event[:-1], phase=large.phase[:-1], module=large.module[:-1])
    assert forecast(SmallSteps([trace(2), late]), 64, None).how == SCALED
    vote = large.with_held([4], OTHER)
    there_before = replace(vote, event=np.append(vote.event, -len(vote.size)), phase=np.append(vote.phase, 1),
                           module=np.append(vote.module, 0))  # fmt: skip
    assert forecast(SmallSteps([trace(2), there_before]), 64, None).how == SCALED


def test_what_is_there_for_each_pair_of_samples_grows_with_their_square() -> None:
    small, large = (
        replace(one, size=np.where(one.category == CODE[ACTIVATIONS], one.batch_size**2 * MIB, one.size))
        for one in (trace(2), trace(4))
    )
    assert forecast(SmallSteps([small, large]), 64, None).at_peak[ACTIVATIONS] == 64**2 * MIB


def test_rows_for_all_samples_but_one_lie_on_a_line() -> None:
    small, large = (
        replace(one, size=np.where(one.category == CODE[ACTIVATIONS], (one.batch_size - 1) * MIB, one.size))
        for one in (trace(8), trace(16))
    )
    assert forecast(SmallSteps([small, large]), 64, None).at_peak[ACTIVATIONS] == 63 * MIB


def test_pairs_are_told_where_operator_calls_are_not_known() -> None:
    """As on real GPUs, where tensors are seen and nothing else."""
    small, large = (
        replace(
            one,
            size=np.where(one.category == CODE[ACTIVATIONS], one.batch_size**2 * MIB, one.size),
            call=np.zeros_like(one.call),
            scratch=np.zeros_like(one.scratch),
        )
        for one in (trace(8), trace(16))
    )
    assert forecast(SmallSteps([small, large]), 64, None).at_peak[ACTIVATIONS] == 64**2 * MIB


def test_of_a_single_step_the_largest_batch_is_its_own_or_none() -> None:
    assert largest(SmallSteps([trace(2)]), 100 * MIB, 1000) == 2
    assert largest(SmallSteps([trace(2)], varies=True), 30 * MIB, 1000) == 0


def test_a_line_through_two_peaks_is_not_below_the_larger_one_and_not_made_of_segments() -> None:
    small, large = trace(64), trace(2)
    small, large = replace(small, batch_size=2), replace(large, batch_size=4, before=np.zeros(4, dtype=np.bool_))
    found = forecast(SmallSteps([small, large]), 1000, None)
    alone = forecast(SmallSteps([large]), 4, None)
    assert found.how == BY_PEAKS
    assert (found.live_peak_bytes, found.reserved_peak_bytes) == (alone.live_peak_bytes, alone.reserved_peak_bytes)


def test_steps_that_have_nothing_in_common_are_continued_by_their_peaks() -> None:
    other = trace(4)
    other = replace(other, before=np.zeros(4, dtype=np.bool_))
    assert forecast(SmallSteps([trace(2), other]), 64, None).how == BY_PEAKS


def test_an_update_that_is_the_peak_of_both_small_steps_hides_nothing_of_what_grows() -> None:
    """Such as that of Adam: a line through the peaks of whole steps would let any batch fit."""
    large = trace(4)
    large = replace(large, call=np.where(large.call == 0, 9, large.call))
    found = forecast(SmallSteps([trace(2), large]), 64, None)
    assert (found.how, found.live_peak_bytes, found.phase) == (BY_PEAKS, (1 + 64 + 16) * MIB, "forward")
    assert found.at_peak == {PARAMETERS: MIB, ACTIVATIONS: 64 * MIB, TEMPORARIES: 16 * MIB}
    assert forecast(SmallSteps([trace(2), large]), 3, None).live_peak_bytes == 21 * MIB, "the update's"
    assert largest(SmallSteps([trace(2), large]), 100 * MIB, 1000) < 80


COLLECTS = AllocatorSettings(garbage_collection_threshold=0.5)


def with_garbage(batch_size: int) -> Trace:
    """What was free before the last temporary is too small for it, and goes if there is much of it."""
    one = trace(batch_size)
    return replace(one, size=np.where(one.size == 20 * MIB, 100 * batch_size * MIB, one.size))


def test_garbage_is_collected_above_a_share_of_what_the_process_may_have_and_not_of_what_others_left() -> None:
    small, limit = SmallSteps([with_garbage(2), with_garbage(4)]), 20 * 2**30
    left = 120 * 64 * MIB  # of the limit, on a device that others use

    def reserved(*allowed: int) -> int:
        return forecast(small, 64, left, COLLECTS, *allowed).reserved_peak_bytes

    assert reserved(limit) == reserved(0) == forecast(small, 64, left, DEFAULT).reserved_peak_bytes
    assert reserved(100 * MIB) == reserved(0) - (64 + 16) * MIB
    assert reserved() == reserved(left)
    assert largest(small, left, 100, limit) <= largest(small, left, 100, 100 * MIB)


def test_a_line_through_two_peaks_says_that_garbage_would_make_it_less() -> None:
    other = replace(trace(4), before=np.zeros(4, dtype=np.bool_), allocator=COLLECTS)
    small = SmallSteps([trace(2), other])
    found = forecast(small, 64, 2**30)
    assert "at most, because garbage_collection_threshold" in found.how
    assert found.error_bytes == forecast(small, 64, 2**30, DEFAULT).error_bytes >= 20 * MIB
    assert found.with_another_allocator() == found
    for never in (forecast(small, 64, None), forecast(small, 64, 2**30, None, 0), forecast(small, 64, 2**30, DEFAULT)):
        assert never.how == BY_PEAKS


def test_samples_of_different_sizes_are_told_of_with_a_large_error() -> None:
    small, large = (
        replace(one, category=np.where(one.category == CODE[ACTIVATIONS], CODE[INPUTS], one.category))
        for one in (trace(2), trace(4))
    )
    assert forecast(SmallSteps([small, large]), 64, None).how == SCALED
    longer = replace(large, size=np.where(large.category == CODE[INPUTS], 5 * large.size, large.size))
    found = forecast(SmallSteps([small, longer]), 64, None)
    assert found.how == VARYING
    assert found.live_peak_bytes >= 5 * 64 * MIB


def test_an_optimizer_has_its_state_from_the_second_step_on() -> None:
    first = trace(2)
    made = replace(first, category=np.where(first.size == 20 * MIB, CODE[OPTIMIZER_STATE], first.category))
    kept = replace(made, event=made.event[:-1], phase=made.phase[:-1], module=made.module[:-1])
    found = forecast(SmallSteps([kept]), 2, None)
    assert found.live_peak_bytes == (1 + 20 + 2) * MIB + MIB // 2
    assert found.phase == "forward"


def with_state(batch_size: int) -> Trace:
    """A step without scratch whose update makes a state of 8 MiB, which stays."""
    step = trace(batch_size, scratch=0)
    size, category = step.size.copy(), step.category.copy()
    size[-1], category[-1] = 8 * MIB, CODE[OPTIMIZER_STATE]
    event, phase, module = step.event[:-1], step.phase[:-1], step.module[:-1]
    return replace(step, size=size, category=category, event=event, phase=phase, module=module)


@pytest.mark.parametrize("small", [[12], [3, 6]])
def test_a_first_update_makes_its_state_where_forward_has_left_a_segment_which_the_next_step_lacks(
    small: list[int],
) -> None:
    """The state before forward would lie in a segment of 20 MiB, in whose rest the activations found room."""
    steps = SmallSteps([with_state(size) for size in small])
    found = forecast(steps, 12, 25 * MIB)
    assert found.live_peak_bytes == 21 * MIB
    assert found.reserved_peak_bytes == (2 + 12 + 12) * MIB
    assert not found.fits
    there = SmallSteps([with_state(size).settled() for size in small])
    assert forecast(there, 12, 25 * MIB).reserved_peak_bytes == (2 + 20) * MIB


def test_the_largest_batch_is_the_last_that_fits_with_its_error() -> None:
    small = SmallSteps([trace(2), trace(4)])
    limit = 100 * MIB
    most = largest(small, limit, 1000)
    bounds = [
        one.reserved_peak_bytes + one.error_bytes for one in (forecast(small, at, limit) for at in (most, most + 1))
    ]
    assert bounds[0] <= limit < bounds[1]
    assert largest(small, None, 1000) == 1000
    assert largest(small, 10 * MIB, 1000) == 0


def test_what_waits_in_host_memory_grows_with_the_batch_and_decides_where_that_is_short() -> None:
    waiting = [replace(trace(size), host_bytes=(1 + size) * MIB, host_limit_bytes=12 * MIB) for size in (2, 4)]
    small = SmallSteps(waiting)
    one = forecast(small, 12, None)
    assert (one.host_bytes, one.host_limit_bytes) == (13 * MIB, 12 * MIB)
    found = worst([forecast(small, 11, None), one], [None, None], [None, None], Settings(), "by hand", 0.0)
    assert found.verdict == DOES_NOT_FIT
    assert "13.0 MiB would wait in host memory, of which a rank may use 12.0 MiB" in str(found)
    assert largest(small, None, 1000) == largest(small, 1000 * MIB, 1000) == 11
    assert largest(small, 10 * MIB, 1000) == 0


@pytest.mark.parametrize(
    ("low", "high", "fits", "word"),
    [(90, 99, True, FITS), (90, 101, True, TIGHT), (101, 120, True, TIGHT), (101, 120, False, DOES_NOT_FIT)],
)
def test_the_verdict_is_tight_where_the_limit_lies_within_the_error(low: int, high: int, fits: bool, word: str) -> None:
    assert verdict(low, high, 100, fits) == word
    assert verdict(low, high, None, fits) == NO_LIMIT


def test_the_rank_with_least_room_counts() -> None:
    forecasts = [Forecast(size * MIB, size * MIB, True, {ACTIVATIONS: size * MIB}, "", "", SCALED) for size in (50, 40)]
    found = worst(forecasts, [200 * MIB, 100 * MIB], [None, None], Settings(), "by hand", 0.0)
    assert (found.live_peak_bytes, found.limit_bytes, found.device_bytes) == (40 * MIB, 100 * MIB, None)
    assert "fits: live peak 40.0 MiB" in str(found)


def test_the_worst_verdict_counts_before_the_share_of_the_limit() -> None:
    sure = Forecast(80 * MIB, 80 * MIB, True, {ACTIVATIONS: 80 * MIB}, "", "", SCALED)
    rough = Forecast(75 * MIB, 75 * MIB, True, {ACTIVATIONS: 75 * MIB}, "", "", VARYING)
    found = worst([sure, rough], [100 * MIB] * 2, [None, None], Settings(), "by hand", 0.0)
    assert (found.verdict, found.live_peak_bytes) == (TIGHT, 75 * MIB)
