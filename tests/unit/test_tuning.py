"""The tuner's search, on machines whose memory and speed are known."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from gpumem_nb.planning.tuning.record import Candidate, speed_of
from gpumem_nb.planning.tuning.result import TuneResult
from gpumem_nb.planning.tuning.space import Space
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import DataInfo, Splits
from tests.unit.tuned_machine import MIB, RANKS, WORKLOAD, bytes_of, said_of, seconds_of, space_of, tuned


def _best_rate(choice: Space, limit_mib: float) -> float:
    fitting = [one for one in choice.candidates if bytes_of(one) <= MIB * limit_mib]
    return max(one.samples_per_rank * RANKS / seconds_of(one) for one in fitting)


@pytest.mark.parametrize("limit_mib", [44, 100, 250, 600])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("start", [{}, {"batch_size": 1, "accumulation_steps": 64}, {"checkpointing": "sqrt"}])
def test_what_is_found_is_nearly_as_fast_as_the_fastest_of_all(
    limit_mib: float, same: bool, start: dict[str, Any]
) -> None:
    present = Settings(**{"batch_size": 64, **start})
    result, machine, choice = tuned(present, limit_mib, noise=0.03, same_mathematics=same)
    assert result.best is not None
    rate = result.best.settings.samples_per_rank * RANKS / seconds_of(result.best.settings)
    assert rate >= 0.95 * _best_rate(choice, limit_mib)
    assert len(set(machine.measured)) <= 0.5 * len(choice.candidates)


@pytest.mark.parametrize("limit_mib", [59.4, 97.8, 136.2])
@pytest.mark.parametrize("start", [{"batch_size": 4, "accumulation_steps": 16}, {"batch_size": 64}])
def test_what_is_found_has_room_and_is_nearly_as_fast_as_all_that_has(limit_mib: float, start: dict[str, Any]) -> None:
    """Limits lie 1 MiB above what something needs, and what is said of memory may be wrong by 2 MiB."""
    result, _, choice = tuned(Settings(**start), limit_mib, noise=0.03, error_mib=2, same_mathematics=False)
    assert not result.best.tight
    rate = result.best.settings.samples_per_rank * RANKS / seconds_of(result.best.settings)
    assert rate >= 0.95 * _best_rate(choice, limit_mib - 2)
    assert any(one.tight for one in result.measured)


def test_what_is_measured_fits_and_keeps_the_global_batch_and_the_mathematics() -> None:
    present = Settings(batch_size=16, accumulation_steps=3)
    result, machine, choice = tuned(present, 150)
    assert choice.knobs == ("checkpointing", "batch_size", "accumulation_steps", "optimizer_impl")
    assert {one.samples_per_rank for one in machine.measured} == {48}
    assert {one.precision for one in machine.measured} == {"fp32"}
    assert {one.batch_size for one in choice.candidates} == {1, 2, 3, 4, 6, 8, 12, 16, 24, 48}
    assert "keeps the mathematics to rounding" in result.why


def test_the_best_take_turns_with_the_present_settings() -> None:
    present = Settings(batch_size=8, accumulation_steps=8)
    result, machine, _ = tuned(present, 600)
    last = machine.measured[-6:]
    assert set(last) == {present, result.best.settings}
    assert last[:3] != last[3:] or len(set(last[:2])) == 2
    assert len(result.best.rates) == len(result.now.rates) >= 6


def test_nothing_clearly_faster_leaves_the_present_settings() -> None:
    result, _, _ = tuned(Settings(batch_size=64, optimizer_impl="fused"), 1000)
    assert result.best is result.now
    assert result.why.startswith("Of what was measured, the present settings are the fastest that fit")


def test_where_nothing_fits_the_least_is_named() -> None:
    result, machine, _ = tuned(Settings(batch_size=64), 21)
    assert machine.measured == []
    assert result.best is None
    assert result.why.startswith("Nothing fits 21.0 MiB: the least is 23.0 MiB")
    assert "checkpointing=blocks batch_size=1 accumulation_steps=64" in result.why
    with pytest.raises(WorkloadError, match="nothing to apply"):
        result.apply()


def test_an_answer_comes_however_early_it_ends() -> None:
    present = Settings(batch_size=64)
    for seconds in (0.05, 0.5, 2, 5, 20):
        result, machine, _ = tuned(present, 600, seconds=seconds)
        assert result.why
        assert str(result)
        if machine.measured:
            assert result.best is not None


@pytest.mark.parametrize("seconds", [3, 6, 10, 20])
@pytest.mark.parametrize("start", [{}, {"batch_size": 4, "accumulation_steps": 16}])
def test_no_trial_is_begun_that_would_end_too_late(seconds: float, start: dict[str, Any]) -> None:
    """Each turn takes a second or so; that of settings which were not measured yet is only known roughly."""
    result, machine, _ = tuned(Settings(**{"batch_size": 64, **start}), 600, seconds=seconds)
    assert result.measured
    longest_s = max(3 * seconds_of(one) for one in machine.measured)
    assert machine.spent_s <= seconds + 0.2 * longest_s
    assert "were given" not in str(result)


def test_an_answer_that_took_longer_says_so_and_why() -> None:
    result, machine, _ = tuned(Settings(batch_size=1, accumulation_steps=64), 600, seconds=2)
    assert len(machine.measured) == 1
    assert "in 7 s, for 2 s that were given: one trial took up to 6.6 s" in str(result)
    assert "more were not tried. Give it more time: %hvd_tune --seconds 60." in result.why


def test_the_pareto_front_has_no_setting_that_another_one_beats() -> None:
    result, _, _ = tuned(Settings(batch_size=64), 700, same_mathematics=False)
    front = result.pareto()
    for one, other in itertools.permutations(front, 2):
        less = other.predicted.reserved_peak_bytes <= one.predicted.reserved_peak_bytes
        assert not (less and other.samples_per_s >= one.samples_per_s)
    for one in result.measured:
        if one not in front:
            assert any(
                f.predicted.reserved_peak_bytes <= one.predicted.reserved_peak_bytes
                and f.samples_per_s >= one.samples_per_s
                for f in front
            )
    frame = result.frame()
    assert frame[frame.best].flip.tolist() == [result.flip(result.best)]
    assert frame.pareto.sum() == len(front)


def test_another_global_batch_is_split_in_every_way() -> None:
    choice = space_of(Settings(batch_size=32), global_batch=24)
    assert choice.start.batch_size == 12
    assert {one.samples_per_rank for one in choice.candidates} == {12}


def test_data_that_bring_micro_batches_keep_them() -> None:
    workload = replace(WORKLOAD, data=DataInfo(batch_size=16, batched=True))
    choice = space_of(Settings(batch_size=16, accumulation_steps=2), workload)
    assert {(one.batch_size, one.accumulation_steps) for one in choice.candidates} == {(16, 2)}
    with pytest.raises(InvalidInput, match="micro-batches of 16 samples, of which 20"):
        space_of(Settings(batch_size=16), workload, global_batch=40)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"knobs": ["bucket_mib"]}, "'bucket_mib' is not a knob that can be tuned.*autotune=on"),
        ({"knobs": ["precison"]}, "did you mean 'precision'"),
        ({"knobs": []}, "No knob to tune was named"),
        ({"knobs": "precision"}, "is not a list of names"),
        ({"knobs": [["precision"]]}, r"knobs=\[\['precision'\]\] is not a list of names"),
        ({"knobs": {"precision": ["bf16"]}}, "is not a list of names"),
        ({"knobs": ["checkpointing", 1]}, "is not a list of names"),
        ({"knobs": ["precision"]}, "precision changes the mathematics.*--any-mathematics"),
        ({"global_batch": 7}, "A global batch of 7 cannot be split over 2 ranks.*such as 8"),
        ({"global_batch": 0}, "write a whole number"),
        ({"global_batch": 2.5}, "write a whole number"),
        ({"global_batch": 10_000}, "too large"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_a_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        space_of(Settings(), **options)


def test_what_each_change_gives_is_told() -> None:
    result, _, _ = tuned(Settings(batch_size=8, accumulation_steps=8, checkpointing="sqrt"), 1000)
    assert "× by checkpointing=none" in result.why
    assert "× by batch_size=" in result.why


def test_what_whole_steps_do_not_fit_gives_way_to_smaller_micro_batches() -> None:
    """Small steps say that all fit; whole ones of 32 samples and more take three times as much."""
    result, machine, _ = tuned(Settings(batch_size=64), 600, more=lambda one: 3.0 if one.batch_size >= 32 else 1.0)
    assert result.best is not None
    assert result.best.settings.batch_size == 16
    large = [one for one in machine.measured if one.batch_size >= 32 and 3 * bytes_of(one) > 600 * MIB]
    assert len(large) == len(set(large)), "what once did not fit is not measured again"
    assert all(one.settings.batch_size < 32 for one in result.measured if 3 * bytes_of(one.settings) > 600 * MIB)


def _candidate(reserved_mib: float, error_mib: float, *rates: float, **changes: Any) -> Candidate:
    """What whole steps were taken under, of 100 MiB."""
    settings = Settings(batch_size=8, accumulation_steps=8).replace(**changes)
    said = said_of(settings, round(MIB * reserved_mib), 100 * MIB, round(MIB * error_mib))
    return Candidate(settings, said, list(rates))


def test_what_is_tight_is_named_and_no_answer_while_something_has_room() -> None:
    choice = space_of(Settings(batch_size=8, accumulation_steps=8))
    tight = _candidate(99, 2, 110.0, 111.0, 112.0, checkpointing="blocks")
    slow, near = _candidate(50, 2, 90.0, 90.0, 91.0), _candidate(50, 2, 110.0, 110.0, 111.0)

    def best(*looked_at: Candidate) -> TuneResult:
        return TuneResult(
            choice.start, choice, looked_at, 100 * MIB, RANKS, 1.0, 60.0, 1.0, "", {}, Splits(mean=True), lambda _: None
        )

    assert best(slow, tight).best is slow
    assert "Faster, but too tight to count on: checkpointing none → blocks, 111" in best(slow, tight).why
    assert "with up to 101.0 MiB possible." in best(slow, tight).why
    assert "None of the others that have room is clearly faster. Faster, but" in best(slow, tight).why
    assert "None of 1" not in best(slow, tight).why
    assert best(near, tight).best is near
    assert "None of 1 others that were measured is clearly faster." in best(near, tight).why
    assert "too tight" not in best(near, tight).why
    assert best(tight).best is tight
    assert "tight: up to 101.0 MiB are possible" in best(tight).why
    # The present settings are no better a choice for being the present ones, when they are tight.
    present = _candidate(99, 2, 110.0, 111.0, 112.0)
    roomy = _candidate(50, 2, 110.0, 110.0, 110.0, checkpointing="blocks")
    assert best(present, roomy).best is roomy
    assert best(present).best is present


def test_only_a_small_error_may_reach_beyond_the_limit() -> None:
    assert _candidate(98, 2).fits
    assert not _candidate(98, 2).tight
    assert _candidate(99, 2).tight
    assert not _candidate(101, 2).fits  # it is not expected to
    assert not _candidate(80, 40).fits  # what it needs hangs on the samples, so that steps that went well tell little


def test_a_search_that_saw_little_says_so() -> None:
    result, _, _ = tuned(Settings(batch_size=64), 44, seconds=0.25)
    assert result.best is None
    assert "settings that were looked at" in result.why
    assert "Give it more time" in result.why
    result, _, _ = tuned(Settings(batch_size=64), 600, seconds=0.11)
    assert len(result.measured) == 1
    assert "It is the only one that was measured" in result.why
    result, _, _ = tuned(Settings(batch_size=64), 300, seconds=1.0)
    assert len(result.measured) == 1
    assert "; the present settings do not fit. It keeps the mathematics to rounding. It is the only one" in result.why


def test_no_error_is_told_of_few_turns() -> None:
    result, _, _ = tuned(Settings(batch_size=8, accumulation_steps=8), 600, noise=0.02)
    for one in result.looked_at:
        assert math.isnan(one.error) == (len(one.rates) < 3)
    frame = result.frame()
    assert frame[frame.turns < 3].samples_per_s_error.isna().all()


def test_another_global_batch_is_compared_with_what_it_begins_with() -> None:
    result, _, choice = tuned(Settings(batch_size=8), 600, global_batch=128)
    assert choice.start.samples_per_rank == 64
    assert result.now.settings == choice.start
    assert len(result.now.rates) == len(result.best.rates), "the first turn alone is that of a cold machine"
    assert "do not fit" not in result.why
    assert "of the present settings with that global batch" in result.why
    assert speed_of(result.best) > speed_of(result.now)


def test_applying_leaves_other_knobs_alone() -> None:
    result, _, _ = tuned(Settings(batch_size=8, accumulation_steps=8), 600)
    applied: list[dict[str, Any]] = []
    replace(result, _set=applied.append).apply()
    [knobs] = applied
    assert result.present.replace(**knobs) == result.best.settings
    assert set(knobs) == set(result.space.knobs)


def test_applying_brings_back_tuned_knobs_that_were_changed_meanwhile() -> None:
    """What was measured is applied, and no mixture of it with something that nobody has measured."""
    result, _, _ = tuned(Settings(batch_size=64), 1000)
    assert set(result.best.settings.changed_from(result.present)) == {"optimizer_impl"}
    applied: list[dict[str, Any]] = []
    replace(result, _set=applied.append).apply()
    assert Settings(batch_size=256, checkpointing="sqrt").replace(**applied[0]) == result.best.settings


def test_models_without_blocks_are_not_checkpointed() -> None:
    choice = space_of(Settings(), replace(WORKLOAD, blocks=0))
    assert {one.checkpointing for one in choice.candidates} == {"none"}


def test_shares_of_the_state_are_chosen_from_where_that_is_asked_for_and_there_are_several_ranks() -> None:
    several = replace(WORKLOAD, why_whole="")
    assert {one.shard_optimizer for one in space_of(Settings(), several).candidates} == {"off"}
    named = space_of(Settings(), several, knobs=["shard_optimizer", "batch_size"])
    assert {one.shard_optimizer for one in named.candidates} == {"off", "on"}
    with pytest.raises(InvalidInput, match=r"shard_optimizer has no other value.*ranks cannot share"):
        space_of(Settings(), WORKLOAD, knobs=["shard_optimizer"])


def test_blocks_are_compiled_where_that_is_asked_for_and_can_be() -> None:
    able = replace(WORKLOAD, why_uncompiled="")
    assert {one.compile for one in space_of(Settings(), able).candidates} == {"off"}
    named = space_of(Settings(), able, knobs=["compile", "checkpointing"])
    assert {(one.compile, one.checkpointing) for one in named.candidates} >= {("blocks", "none"), ("blocks", "sqrt")}
    with pytest.raises(InvalidInput, match=r"compile has no other value.*blocks cannot be compiled here"):
        space_of(Settings(), replace(WORKLOAD, why_uncompiled="no compiler"), knobs=["compile"])


def test_logits_in_parts_are_chosen_from_where_that_is_asked_for_and_there_are_some() -> None:
    language = replace(WORKLOAD, logits=True)
    assert {one.loss_head for one in space_of(Settings(), language).candidates} == {"full"}
    named = space_of(Settings(), language, knobs=["loss_head", "batch_size"])
    assert {one.loss_head for one in named.candidates} == {"full", "chunked"}
    with pytest.raises(InvalidInput, match=r"loss_head has no other value.*no linear layer with more outputs"):
        space_of(Settings(), WORKLOAD, knobs=["loss_head"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"knobs": ["checkpointing"]}, "checkpointing has no other value with what is loaded: the model has no blocks"),
        ({"knobs": ["checkpointing"]}, r"Leave knobs out, or name others: batch_size, accumulation_steps"),
        ({"knobs": ["accumulation_steps"], "global_batch": 2}, "accumulation_steps has no other value.*one sample"),
        ({"knobs": ["accumulation_steps"], "global_batch": 2}, "name others: optimizer_impl"),
        ({"knobs": ["batch_size", "checkpointing"], "global_batch": 2}, "one sample.*; checkpointing has no other"),
    ],
)
def test_named_knobs_that_leave_no_choice_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        space_of(Settings(), replace(WORKLOAD, blocks=0), **options)


def test_a_global_batch_beyond_all_bounds_is_refused_at_once() -> None:
    with pytest.raises(InvalidInput, match="too large"):
        space_of(Settings(), replace(WORKLOAD, dataset_len=None), global_batch=10**12)
    names = (name for name in ["checkpointing"])
    assert space_of(Settings(), knobs=names).knobs == ("checkpointing",)
    with pytest.raises(InvalidInput, match="is not a list of names"):
        space_of(Settings(), knobs=123)
    with pytest.raises(InvalidInput, match="micro-batches of their own"):
        space_of(
            Settings(batch_size=16), replace(WORKLOAD, data=DataInfo(batch_size=16, batched=True)), knobs=["batch_size"]
        )
