"""Who waits for whom, in words."""

from __future__ import annotations

import dataclasses
import time

from gpumem_nb.report import waits as wait_reports
from gpumem_nb.shared.answers import Apart, Pulse, Waiting

BUCKET = "grouped all-reduce 'gpumem_nb.bucket.0'"


def pulse(doing: str, seconds: float = 5.0, waiting: Waiting | None = None, age_s: float = 0.0) -> Pulse:
    return Pulse(doing, seconds, time.time() - age_s, waiting, limit_s=30.0)


def test_a_late_rank_and_those_who_wait_for_it_are_named() -> None:
    waits = pulse("the reduction part of step 12", waiting=Waiting(BUCKET, 4.0))
    wait_report = wait_reports.now(
        {0: waits, 1: waits, 2: pulse("the data part of step 12"), 3: waits}, range(4), size=4
    )
    assert wait_report
    assert str(wait_report) == (
        "Rank 2 is in the data part of step 12, ranks 0-1,3 wait in the gradient reduction of step 12 for 4 s"
    )


def test_votes_that_travel_by_themselves_are_part_of_the_gradient_reduction() -> None:
    waits = pulse("the reduction part of step 12", waiting=Waiting("all-reduce 'gpumem_nb.ballot'", 4.0))
    wait_report = wait_reports.now({0: waits, 1: pulse("the forward part of step 12")}, range(2), size=2)
    assert wait_report
    assert wait_report.text.endswith("rank 0 waits in the gradient reduction of step 12")


def test_updated_weights_that_are_waited_for_are_named() -> None:
    waits = pulse("the update part of step 12", waiting=Waiting("all-gather 'gpumem_nb.shares.3'", 4.0))
    wait_report = wait_reports.now({0: waits, 1: pulse("the update part of step 12")}, range(2), size=2)
    assert wait_report
    assert wait_report.text.endswith("rank 0 waits in the all-gather of updated weights")


def test_a_reduction_outside_of_training_names_what_ranks_are_at() -> None:
    waits = pulse("forecast", waiting=Waiting(BUCKET, 4.0))
    wait_report = wait_reports.now({0: waits, 1: pulse("forecast")}, range(2), size=2)
    assert wait_report
    assert wait_report.text.endswith("rank 0 waits in the gradient reduction of forecast")


def test_ranks_without_a_pulse_are_told_apart() -> None:
    waits = {0: pulse("a cell", waiting=Waiting("all-reduce 'mine'", 3.0))}
    idle = wait_reports.now(waits, [0], size=2)
    stopped = wait_reports.now(waits, [0, 1], size=2)
    assert idle
    assert idle.text == "rank 1 is idle, rank 0 waits in all-reduce 'mine' of a cell"
    assert stopped
    assert stopped.text.startswith("rank 1 is not responding, ")
    old = wait_reports.now({**waits, 1: pulse("a cell", age_s=60.0)}, [0, 1], size=2)
    assert old == stopped


def test_what_is_fast_is_not_worth_a_word() -> None:
    assert wait_reports.now({}, [0, 1], size=2) is None
    assert wait_reports.now({0: pulse("a cell", 1.5)}, [0], size=2) is None


def test_ranks_that_came_apart_without_having_waited_did_not_stall() -> None:
    assert wait_reports.ended({0: Apart("a cell", None)}, {}, [], size=2) is None
    assert wait_reports.ended({0: Apart("a cell", Waiting("all-reduce 'x'", 0.0))}, {}, [], size=2) is None


def test_what_ended_is_told_in_the_past() -> None:
    apart = {0: Apart("the reduction part of step 3", Waiting(BUCKET, 31.0))}
    wait_report = wait_reports.ended(apart, {1: pulse("the forward part of step 3", 32.0)}, [1], size=2)
    assert wait_report
    assert (
        wait_report.text
        == "rank 1 was in the forward part of step 3, rank 0 waited in the gradient reduction of step 3"
    )
    assert wait_report.seconds == 31.0


def test_who_waits_far_beyond_the_limit_cannot_be_freed() -> None:
    late, early = (pulse("a cell", waiting=Waiting("barrier", seconds)) for seconds in (36.0, 34.0))
    assert wait_reports.out_of_reach({0: early, 1: late})
    assert not wait_reports.out_of_reach({0: early, 1: pulse("a cell")})


def test_how_long_a_rank_waits_is_what_it_says_itself() -> None:
    late = pulse("a cell", waiting=Waiting("barrier", 36.0))
    assert not wait_reports.out_of_reach({0: dataclasses.replace(late, limit_s=60.0)})
