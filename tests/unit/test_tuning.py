"""The tuner's search, on machines whose memory and speed are known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpumem_nb.planning.prediction import Prediction, verdict
from gpumem_nb.planning.tuning.record import Candidate, Record, fits, may_fit, speed_of
from gpumem_nb.planning.tuning.result import TuneResult
from gpumem_nb.planning.tuning.search import search
from gpumem_nb.planning.tuning.space import Space, space
from gpumem_nb.planning.tuning.trial_times import TrialTimes
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import DataInfo, WorkloadInfo

MIB = 2**20
RANKS = 2
WORKLOAD = WorkloadInfo("mine", 1000, 4000, 4096, 4)


def _space(present: Settings, workload: WorkloadInfo = WORKLOAD, **options: Any) -> Space:
    def ask(changes: Mapping[str, Any]) -> Settings:
        after = present.replace(**changes)
        if after.samples_per_rank * RANKS > (workload.dataset_len or 0):
            raise InvalidInput("too large")
        return after

    return space(present, workload, RANKS, ask, **options)


def _bytes(settings: Settings) -> int:
    each = {"none": 8, "blocks": 3, "sqrt": 4}[settings.checkpointing] * (1 if settings.precision == "fp32" else 0.6)
    return int(MIB * (20 + each * settings.batch_size))


def _seconds(settings: Settings) -> float:
    """Of a step: calling operators costs as much in a micro-batch of any size."""
    recomputing = 1.0 if settings.checkpointing == "none" else 1.33
    of_precision = {"fp32": 1.0, "fp16": 0.7, "bf16": 0.6}[settings.precision]
    update = {"default": 0.02, "foreach": 0.02, "loop": 0.05, "fused": 0.01}[settings.optimizer_impl]
    micro = (0.03 + 0.004 * settings.batch_size * of_precision) * recomputing
    return float(settings.accumulation_steps * micro + update)


def _said(settings: Settings, reserved: int, limit: int | None, error: int = 0) -> Prediction:
    low, high = reserved - error, reserved + error
    said = verdict(low, high, limit, limit is None or reserved <= limit)
    return Prediction(settings, reserved, reserved, None, low, high, limit, said, {}, "", "", "", 0.0)


class Machine:
    """Measures in no time; counts seconds by itself."""

    def __init__(
        self,
        limit_bytes: int | None,
        seconds: float,
        noise: float = 0.0,
        more: Callable[[Settings], float] = lambda settings: 1.0,
        step_s: Callable[[Settings], float] = _seconds,
    ) -> None:
        self.more = more  # memory that whole steps take, times what small ones say
        self.step_s = step_s
        self.record = Record()
        self.limit_bytes = limit_bytes
        self.seconds = seconds
        self.spent_s = 0.0
        self.times = TrialTimes()
        self.measured: list[Settings] = []
        self._noise = random.Random(0)
        self._share = noise

    def time_spent(self) -> float:
        return self.spent_s / self.seconds

    def time_for(self, settings: Settings) -> bool:
        ahead_s = self.times.ahead_s(settings, settings in self.record.candidates) if self.record.measured else 0.0
        return self.seconds - self.spent_s > ahead_s

    def fits(self, settings: Settings) -> bool:
        known = self.record.candidates
        if settings not in known:
            self.spent_s += 0.1
            self.times.small_steps(0.1)
            reserved = _bytes(settings)
            said = _said(settings, reserved, self.limit_bytes)
            known[settings] = Candidate(settings, said, fits(said))
        return known[settings].fits

    def measure(self, settings: Settings) -> None:
        assert self.record.candidates[settings].fits, "nothing is measured that is not expected to fit"
        self.measured.append(settings)
        step_s = self.step_s(settings)
        self.spent_s += 3 * step_s
        self.times.turn(settings, 3 * step_s, step_s)
        noise = 1 + self._noise.gauss(0, self._share)
        rate = settings.samples_per_rank * RANKS / step_s * noise
        reserved = round(_bytes(settings) * self.more(settings))
        said = _said(settings, reserved, self.limit_bytes)
        self.record.candidates[settings].took_steps(replace(said, samples_per_s=rate if fits(said) else None))


def tuned(
    present: Settings,
    limit_mib: float | None,
    seconds: float = 100.0,
    noise: float = 0.0,
    more: Callable[[Settings], float] = lambda settings: 1.0,
    step_s: Callable[[Settings], float] = _seconds,
    **options: Any,
) -> Any:
    choice = _space(present, **options)
    machine = Machine(None if limit_mib is None else round(MIB * limit_mib), seconds, noise, more, step_s)
    search(choice, machine)
    result = TuneResult(
        present=present,
        space=choice,
        looked_at=tuple(machine.record.candidates.values()),
        budget_bytes=machine.limit_bytes,
        ranks=RANKS,
        seconds=machine.spent_s,
        given_s=seconds,
        longest_s=machine.times.longest_s,
        stopped="",
        refused={},
        batch_norm=False,
        _set=lambda _: None,
    )
    return result, machine, choice


def _best_rate(choice: Space, limit_mib: float) -> float:
    fitting = [one for one in choice.candidates if _bytes(one) <= MIB * limit_mib]
    return max(one.samples_per_rank * RANKS / _seconds(one) for one in fitting)


@pytest.mark.parametrize("limit_mib", [44, 100, 250, 600])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("start", [{}, {"batch_size": 1, "accumulation_steps": 64}, {"checkpointing": "sqrt"}])
def test_what_is_found_is_nearly_as_fast_as_the_fastest_of_all(
    limit_mib: float, same: bool, start: dict[str, Any]
) -> None:
    present = Settings(**{"batch_size": 64, **start})
    result, machine, choice = tuned(present, limit_mib, noise=0.03, same_mathematics=same)
    assert result.best is not None
    rate = result.best.settings.samples_per_rank * RANKS / _seconds(result.best.settings)
    assert rate >= 0.95 * _best_rate(choice, limit_mib)
    assert len(set(machine.measured)) <= 0.5 * len(choice.candidates)


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
    longest_s = max(3 * _seconds(one) for one in machine.measured)
    assert machine.spent_s <= seconds + 0.2 * longest_s
    assert "were given" not in str(result)


def test_an_answer_that_took_longer_says_so_and_why() -> None:
    result, machine, _ = tuned(Settings(batch_size=1, accumulation_steps=64), 600, seconds=2)
    assert len(machine.measured) == 1
    assert "in 7 s, for 2 s that were given: one trial took up to 6.6 s" in str(result)
    assert "more were not looked at. Give it more time: %hvd_tune --seconds 60." in result.why


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
    choice = _space(Settings(batch_size=32), global_batch=24)
    assert choice.start.batch_size == 12
    assert {one.samples_per_rank for one in choice.candidates} == {12}


def test_data_that_bring_micro_batches_keep_them() -> None:
    workload = replace(WORKLOAD, data=DataInfo(batch_size=16, batched=True))
    choice = _space(Settings(batch_size=16, accumulation_steps=2), workload)
    assert {(one.batch_size, one.accumulation_steps) for one in choice.candidates} == {(16, 2)}
    with pytest.raises(InvalidInput, match="micro-batches of 16 samples, of which 20"):
        _space(Settings(batch_size=16), workload, global_batch=40)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"knobs": ["bucket_mib"]}, "'bucket_mib' is no knob that is tuned.*autotune=on"),
        ({"knobs": ["precison"]}, "did you mean 'precision'"),
        ({"knobs": []}, "No knob to tune was named"),
        ({"knobs": "precision"}, "is no list of names"),
        ({"knobs": ["precision"]}, "precision changes the mathematics.*--any-mathematics"),
        ({"global_batch": 7}, "A global batch of 7 cannot be split over 2 ranks.*such as 8"),
        ({"global_batch": 0}, "write a whole number"),
        ({"global_batch": 2.5}, "write a whole number"),
        ({"global_batch": 10_000}, "too large"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_a_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        _space(Settings(), **options)


def test_what_each_change_gives_is_told() -> None:
    result, _, _ = tuned(Settings(batch_size=8, accumulation_steps=8, checkpointing="sqrt"), 1000)
    assert "× by checkpointing=none" in result.why
    assert "× by batch_size=" in result.why


def test_what_whole_steps_do_not_fit_gives_way_to_smaller_micro_batches() -> None:
    """Small steps say that all fit; whole ones of 32 samples and more take three times as much."""
    result, machine, _ = tuned(Settings(batch_size=64), 600, more=lambda one: 3.0 if one.batch_size >= 32 else 1.0)
    assert result.best is not None
    assert result.best.settings.batch_size == 16
    large = [one for one in machine.measured if one.batch_size >= 32 and 3 * _bytes(one) > 600 * MIB]
    assert len(large) == len(set(large)), "what once did not fit is not measured again"
    assert all(one.settings.batch_size < 32 for one in result.measured if 3 * _bytes(one.settings) > 600 * MIB)


def _candidate(reserved_mib: float, error_mib: float, *rates: float, **changes: Any) -> Candidate:
    """What whole steps were taken under, of 100 MiB."""
    settings = Settings(batch_size=8, accumulation_steps=8).replace(**changes)
    said = _said(settings, round(MIB * reserved_mib), 100 * MIB, round(MIB * error_mib))
    return Candidate(settings, said, may_fit(said), list(rates))


def test_what_is_tight_was_measured_and_has_to_be_clearly_faster() -> None:
    choice = _space(Settings(batch_size=8, accumulation_steps=8))
    tight = _candidate(99, 2, 110.0, 111.0, 112.0, checkpointing="blocks")
    slow, near = _candidate(50, 2, 90.0, 90.0, 91.0), _candidate(50, 2, 110.0, 110.0, 111.0)

    def best(*looked_at: Candidate) -> TuneResult:
        return TuneResult(
            choice.start, choice, looked_at, 100 * MIB, RANKS, 1.0, 60.0, 1.0, "", {}, False, lambda _: None
        )

    assert best(slow, tight).best is tight
    assert "tight: up to 101.0 MiB are possible" in best(slow, tight).why
    assert best(near, tight).best is near
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
    assert "; the present settings do not fit. It is the only one that was measured" in result.why


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
    assert "of these settings" in result.why
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
    choice = _space(Settings(), replace(WORKLOAD, blocks=0))
    assert {one.checkpointing for one in choice.candidates} == {"none"}


def test_a_global_batch_beyond_all_bounds_is_refused_at_once() -> None:
    with pytest.raises(InvalidInput, match="too large"):
        _space(Settings(), replace(WORKLOAD, dataset_len=None), global_batch=10**12)
    names = (name for name in ["checkpointing"])
    assert _space(Settings(), knobs=names).knobs == ("checkpointing",)
    with pytest.raises(InvalidInput, match="is no list of names"):
        _space(Settings(), knobs=123)
    with pytest.raises(InvalidInput, match="micro-batches of their own"):
        _space(
            Settings(batch_size=16), replace(WORKLOAD, data=DataInfo(batch_size=16, batched=True)), knobs=["batch_size"]
        )


def test_other_knobs_are_measured_where_it_is_fastest() -> None:
    def small_is_fast(settings: Settings) -> float:
        """Larger micro-batches than 8 leave the cache."""
        update = {"default": 0.2, "foreach": 0.2, "loop": 0.3, "fused": 0.1}[settings.optimizer_impl]
        return update + (1.0 if settings.batch_size <= 8 else 1.5)

    result, machine, _ = tuned(Settings(batch_size=8, accumulation_steps=8), 600, step_s=small_is_fast)
    assert result.best is not None
    assert result.best.settings.optimizer_impl == "fused"
    assert result.best.settings.batch_size <= 8
    assert Settings(batch_size=8, accumulation_steps=8, optimizer_impl="loop") in machine.measured


def test_of_batch_norm_it_is_said_that_other_micro_batches_change_it() -> None:
    result, _, _ = tuned(Settings(batch_size=2, accumulation_steps=32), 600)
    of_batches = replace(result, batch_norm=True)
    size = result.best.settings.batch_size
    assert size != 2
    assert f"but for batch norm, whose statistics come from micro-batches of {size} samples then, not of 2." in (
        of_batches.why
    )
    assert "batch norm" not in result.why
    kept, _, _ = tuned(Settings(batch_size=2, accumulation_steps=32), 600, knobs=["optimizer_impl"])
    assert "batch norm" not in replace(kept, batch_norm=True).why


def test_what_could_not_be_tried_is_told_with_the_reason() -> None:
    present = Settings(batch_size=8, accumulation_steps=8)
    result, _, _ = tuned(present, 600)
    fused = [present.replace(optimizer_impl="fused", checkpointing=mode) for mode in ("none", "blocks")]
    told = replace(result, refused=dict.fromkeys(fused, "it has no fused implementation."))
    assert "Left out: optimizer_impl default → fused and 1 more: it has no fused implementation." in str(told)
    frame = told.frame()
    assert len(frame) == len(result.frame()) + 2
    assert list(frame.failed)[-2:] == ["it has no fused implementation."] * 2
    assert not frame.fits.iloc[-1]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ({"batch_size": 8, "accumulation_steps": 8}, "Less may be needed with what changes the mathematics"),
        ({"batch_size": 8, "checkpointing": "none"}, "Less may be needed with a smaller global batch or"),
    ],
)
def test_where_nothing_fits_what_helps_is_named(start: dict[str, Any], said: str) -> None:
    knobs = ["batch_size"] if "accumulation_steps" in start else ["optimizer_impl"]
    result, _, _ = tuned(Settings(**start), 10, knobs=knobs)
    assert said in result.why


def test_what_cannot_become_the_fastest_is_not_measured() -> None:
    def slow_fp16(settings: Settings) -> float:
        return _seconds(settings) * (10 if settings.precision == "fp16" else 1)

    result, machine, _ = tuned(
        Settings(batch_size=8, accumulation_steps=8), 250, step_s=slow_fp16, same_mathematics=False
    )
    fp16 = [one for one in machine.record.candidates if one.precision == "fp16"]
    assert fp16
    assert all(one.checkpointing == "none" for one in fp16), "which only adds to a step"
    assert {one.checkpointing for one in machine.measured if one.precision == "bf16"} == {"none", "blocks", "sqrt"}
    assert result.best.settings.precision == "bf16"
