"""The one place that decides what fits: margins, earlier misses, what runs, lower bounds, and the largest batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpumem_nb.planning.fit import (
    Largest,
    Missed,
    fits,
    largest,
    of_ranks,
    predicted,
    settled,
    verdict,
    with_longest,
    within,
    worth_a_step,
)
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, NO_LIMIT, TIGHT, Prediction
from gpumem_nb.shared.categories import ACTIVATIONS
from gpumem_nb.shared.forecast import (
    BY_PEAKS,
    DRY,
    DRY_CONVOLUTIONS,
    DRY_CONVOLUTIONS_16_BIT,
    DRY_RECURRENT,
    RECORDED,
    SCALED,
    Forecast,
    Forecasts,
)
from gpumem_nb.shared.messages import Failure, Reading
from gpumem_nb.shared.settings import Settings

MIB = 2**20
LIMIT = 1000 * MIB
CAME = (800 * MIB, 900 * MIB)
READING = Reading(0, 0, 0, 0, None, LIMIT)


def forecast(mib: float, how: str = RECORDED, fits: bool = True) -> Forecast:
    size = round(mib * MIB)
    return Forecast(size, size, fits, {ACTIVATIONS: size}, "forward", "net", how)


def said(mib: float, error: float = 0.02, batch_size: int = 8, measured: bool = True) -> Prediction:
    size = round(mib * MIB)
    low, high = round(size * (1 - error)), round(size * (1 + error))
    word = verdict(low, high, LIMIT, size <= LIMIT)
    settings = Settings(batch_size=batch_size)
    return Prediction(settings, size, size, None, low, high, LIMIT, word, {}, "", "", "by hand", 0.1, measured=measured)


def test_a_step_fits_only_where_it_does_in_any_layout_of_the_cache() -> None:
    assert verdict(90, 99, 100, fits=True) == FITS
    assert verdict(90, 99, 100, fits=True, fits_recut=False) == TIGHT
    assert verdict(101, 120, 100, fits=False) == DOES_NOT_FIT


@pytest.mark.parametrize(
    ("live_mib", "finds_room", "how", "word"),
    [
        (950, True, DRY, FITS),
        (950, False, DRY, TIGHT),  # in pieces
        (950, True, DRY_CONVOLUTIONS_16_BIT, FITS),
        (950, True, DRY_CONVOLUTIONS, TIGHT),
        (970, True, DRY, TIGHT),
        (1030, False, DRY, TIGHT),
        (1050, False, DRY, DOES_NOT_FIT),
        (960, True, DRY_RECURRENT, TIGHT),
        (960, True, SCALED, DOES_NOT_FIT),
    ],
)
def test_without_ranks_live_bytes_decide(live_mib: int, finds_room: bool, how: str, word: str) -> None:
    size, reserved = live_mib * MIB, round(1.3 * live_mib * MIB)
    one = Forecast(size, reserved, finds_room and how != SCALED, {ACTIVATIONS: size}, "forward", "net", how)
    found = predicted(one, Settings(), LIMIT, None, "by hand", 0.1)
    assert found.verdict == word
    assert ("live bytes, known within" in found.basis) == (how not in (DRY_RECURRENT, SCALED))
    assert found.low_bytes <= reserved <= found.high_bytes


def test_a_rank_that_ran_out_tells_a_lower_bound_that_is_shown_as_one() -> None:
    failure = Failure(1, "oom", "update", "out of memory", asked_bytes=310 * MIB, free_bytes=10 * MIB)
    ran_out = Forecasts(3, READING, 0.1, LIMIT, failure=failure, failed_batch=8)
    one = of_ranks([Forecasts(3, READING, 0.1, LIMIT, (forecast(10),)), ran_out], Settings(batch_size=64), [8, 16], 0.1)
    assert (one.verdict, one.lower_bound, one.reserved_peak_bytes) == (DOES_NOT_FIT, True, 1300 * MIB)
    assert "more than 1.3 GiB" in str(one)
    assert "more than 1.3 GiB of 1000.0 MiB" in one.refusal
    assert one.columns["lower_bound"]
    assert settled(one, Missed(-0.3, 0.3)) == one, "it needs at least that, whatever else was missed"


@pytest.mark.parametrize(("asked", "free"), [(None, 300), (20, 300), (None, None)])
def test_what_ran_out_needs_more_than_the_limit_whatever_it_said_itself(asked: int | None, free: int | None) -> None:
    """A library of CUDA's does not tell what it asked for; what seemed free may be another process's."""
    wanted, left = (size and size * MIB for size in (asked, free))
    failure = Failure(0, "oom", "forward", "out of memory", asked_bytes=wanted, free_bytes=left)
    out = Forecasts(3, READING, 0.1, LIMIT, failure=failure, failed_batch=8)
    one = of_ranks([out], Settings(), [8], 0.1)
    assert one.low_bytes > LIMIT
    assert one.refusal == "will not fit: more than 1000.0 MiB of 1000.0 MiB"
    assert within(one, LIMIT).verdict == DOES_NOT_FIT


def test_an_update_that_was_taken_and_undone_is_told() -> None:
    why = "no dry run of this Deciding: it asks for the values of tensors."
    answer = Forecasts(3, READING, 0.1, LIMIT, (forecast(10),), update_undone=why)
    told = "the optimizer's update was taken and undone, too (no dry run of this Deciding: it asks for"
    assert told in str(of_ranks([answer], Settings(), [8, 16], 0.1))
    assert "taken and undone" not in str(of_ranks([replace(answer, update_undone="")], Settings(), [8, 16], 0.1))


def test_the_rank_with_least_room_decides() -> None:
    answers = [Forecasts(3, READING, 0.1, LIMIT, (forecast(size),)) for size in (100, 995, 300)]
    one = of_ranks(answers, Settings(), [32], 0.1)
    assert (one.reserved_peak_bytes, one.verdict) == (995 * MIB, TIGHT)


def test_what_runs_is_not_widened_and_small_steps_cannot_say_that_it_does_not_fit() -> None:
    too_large = replace(said(1100, measured=False), verdict=DOES_NOT_FIT)
    assert fits(settled(too_large, Missed(), came=CAME))
    assert not fits(settled(replace(too_large, measured=True), Missed(), came=CAME)), "whole steps can"
    assert settled(said(900), Missed(0.0, 0.2), came=CAME).high_bytes == said(900).high_bytes
    assert settled(said(900), Missed(0.0, 0.2)).verdict == TIGHT


def test_what_runs_needs_what_it_came_to_where_small_steps_ran_out() -> None:
    failure = Failure(1, "oom", "update", "out of memory", asked_bytes=310 * MIB, free_bytes=10 * MIB)
    ran_out = Forecasts(3, READING, 0.1, LIMIT, failure=failure, failed_batch=8)
    one = settled(of_ranks([ran_out], Settings(), [8], 0.1), Missed(), CAME)
    assert (one.verdict, one.runs, one.lower_bound) == (TIGHT, True, False)
    assert (one.live_peak_bytes, one.reserved_peak_bytes) == CAME
    assert "more than" not in str(one)
    assert one.high_bytes == LIMIT, "it runs within that"


def test_what_the_largest_sample_says_does_not_mend_a_cache_that_is_cut() -> None:
    small = replace(said(800), sample="Sample 3 is large.")
    assert with_longest(replace(said(700), verdict=TIGHT), small).verdict == TIGHT
    assert with_longest(said(700), small).verdict == FITS
    assert with_longest(said(900, error=0.5), small).verdict == FITS, "its error was a guess at the largest sample"


def test_what_is_tight_is_worth_a_step_unless_its_error_is_large() -> None:
    assert worth_a_step(said(990))
    assert not worth_a_step(said(700, error=0.5)), "samples differ in size"
    assert not worth_a_step(said(1010))


def found(
    needs: Callable[[int], float],
    sure: int,
    likely: int,
    most: int = 10_000,
    error: float = 0.02,
    measured: bool = True,
) -> tuple[Largest, list[int]]:
    """What the search finds where a batch needs so many MiB, and what it asked about."""
    search = largest(sure, likely, most)
    size, asked = next(search), []
    while True:
        asked.append(size)
        try:
            size = search.send(said(needs(size), error, size, measured))
        except StopIteration as end:
            return end.value, asked


def test_what_small_steps_say_is_confirmed_and_no_more() -> None:
    one, asked = found(lambda size: 100 + size, sure=870, likely=890)
    assert (one.size, asked) == (870, [870])
    assert one.predicted.settings.batch_size == 870


def test_whole_steps_that_need_more_than_small_ones_are_believed() -> None:
    """A table of all pairs, say, that no small step shows."""
    one, asked = found(lambda size: 100 + size + size**2 / 1000, sure=860, likely=880)
    assert verdict_of(one, lambda size: 100 + size + size**2 / 1000) == FITS
    assert one.size > 500
    assert len(asked) <= 8


def verdict_of(one: Largest, needs: Callable[[int], float]) -> str:
    return said(needs(one.size)).verdict


def test_where_small_steps_say_little_whole_ones_decide() -> None:
    one, asked = found(lambda size: 900 + size / 4, sure=0, likely=256)
    assert one.size >= 250, asked
    one, _ = found(lambda size: 100 + size, sure=200, likely=880)
    assert one.size > 600


def test_only_what_does_not_fit_with_one_sample_is_none_at_all() -> None:
    one, asked = found(lambda size: 1100 + size, sure=0, likely=0)
    assert (one.size, one.unknown, asked) == (0, "", [1])
    one, asked = found(lambda size: 994 + size, sure=16, likely=16)
    assert one.size == 0
    assert asked[-1] == 1
    assert one.unknown == "one sample may need 1014.9 MiB"


def test_without_a_limit_or_with_all_samples_nothing_larger_is_looked_for() -> None:
    search = largest(64, 64, 64)
    assert next(search) == 64
    with pytest.raises(StopIteration) as end:
        search.send(replace(said(10), limit_bytes=None, verdict=NO_LIMIT))
    assert end.value.value.size == 64
    one, asked = found(lambda size: size, sure=64, likely=64, most=64)
    assert (one.size, asked) == (64, [64])


def test_the_answer_leaves_a_segment_so_that_asking_again_does_not_deny_it() -> None:
    one, _ = found(lambda size: size, sure=980, likely=1000)
    assert one.predicted.high_bytes <= LIMIT - 2 * MIB


def test_a_line_through_two_peaks_has_a_margin_of_a_whole_segment() -> None:
    assert forecast(10, BY_PEAKS).high_bytes == 30 * MIB
    assert forecast(10, BY_PEAKS).low_bytes == round(8.5 * MIB), "no less than what is live at least"


def test_what_needs_much_more_than_a_budget_does_not_fit_it_though_the_ranks_limit_holds_it() -> None:
    def said_within(budget: float) -> str:
        answer = Forecasts(3, READING, 0.1, round(budget * MIB), (forecast(900, fits=True),))
        return of_ranks([answer], Settings(), [8, 16], 0.1).verdict

    assert [said_within(mib) for mib in (500, 890, 950)] == [DOES_NOT_FIT, TIGHT, FITS]


def test_within_another_limit_a_prediction_is_decided_anew() -> None:
    assert within(said(995), 2 * LIMIT).verdict == FITS
    tight = replace(said(900), verdict=TIGHT)  # where steps of another size have cut the cache
    assert within(tight, 2 * LIMIT).verdict == TIGHT
    assert within(said(900), None).verdict == NO_LIMIT


def test_within_a_much_smaller_limit_what_fits_the_ranks_does_not_fit() -> None:
    assert [within(said(900), mib * MIB).verdict for mib in (500, 890, 950)] == [DOES_NOT_FIT, TIGHT, FITS]
    pieces = replace(said(900), live_peak_bytes=400 * MIB)  # with cached segments given back it may fit
    assert within(pieces, 500 * MIB).verdict == TIGHT
