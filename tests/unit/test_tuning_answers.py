"""What the tuner looks at and what it says, on a machine whose memory and speed are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest

from gpumem_nb.kernel.history import History
from gpumem_nb.kernel.questions.predicting import Predicting
from gpumem_nb.planning.instead import instead_of
from gpumem_nb.planning.prediction import TIGHT, Prediction
from gpumem_nb.planning.tuning.record import Candidate
from gpumem_nb.report.instead import Fit
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Splits
from tests.unit import tuned_machine
from tests.unit.tuned_machine import MIB, WORKLOAD, bytes_of, said_of, seconds_of, tuned


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
    of_batches = replace(result, splits=Splits(True, mean=True))
    size = result.best.settings.batch_size
    assert size != 2
    assert f"but for batch norm, whose statistics come from micro-batches of {size} samples then, not of 2." in (
        of_batches.why
    )
    assert "batch norm" not in result.why
    kept, _, _ = tuned(Settings(batch_size=2, accumulation_steps=32), 600, knobs=["optimizer_impl"])
    assert "batch norm" not in replace(kept, splits=Splits(True, mean=True)).why


def test_of_batch_norm_nothing_is_excepted_from_what_changes_anyway() -> None:
    result, _, _ = tuned(Settings(batch_size=2, accumulation_steps=32), 600, global_batch=256)
    said = replace(result, splits=Splits(True, mean=True)).why
    assert "changes the mathematics" in said
    assert "batch norm" not in said


def test_that_the_present_settings_are_tight_is_told_where_others_are_the_answer() -> None:
    present = Settings(batch_size=32, checkpointing="none")
    result, _, _ = tuned(present, 285, error_mib=10, step_s=lambda settings: settings.samples_per_rank / 100)
    assert result.now is not None
    assert result.now.tight
    assert result.best is not result.now
    assert "of the present settings, which are tight: up to 286.0 MiB are possible" in result.why


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


def test_where_nothing_fits_it_says_what_would_as_everywhere_else() -> None:
    result, _, _ = tuned(Settings(batch_size=8, accumulation_steps=8), 10, knobs=["batch_size"])
    assert result.why.startswith("Nothing fits 10.0 MiB: the least is ")
    half = result.present.replace(precision="bf16")
    told = replace(result, instead=instead_of(result.present, 2, [Fit(half, 9 * MIB)]))
    assert "Predicted, this would fit: precision=bf16 (live peak 9.0 MiB; it changes the mathematics" in told.why
    assert told.why.endswith("Type %hvd_set precision=bf16")


def test_what_cannot_become_the_fastest_is_not_measured() -> None:
    def slow_fp16(settings: Settings) -> float:
        return seconds_of(settings) * (10 if settings.precision == "fp16" else 1)

    result, machine, _ = tuned(
        Settings(batch_size=8, accumulation_steps=8), 250, step_s=slow_fp16, same_mathematics=False
    )
    fp16 = [one for one in machine.record.candidates if one.precision == "fp16"]
    assert fp16
    assert all(one.checkpointing == "none" for one in fp16), "which only adds to a step"
    assert {one.checkpointing for one in machine.measured if one.precision == "bf16"} == {"none", "blocks", "sqrt"}
    assert result.best.settings.precision == "bf16"


def test_what_runs_already_fits_though_a_wide_error_says_less() -> None:
    """Samples that vary in size, say: what each batch needs is known within much more than what fits exactly."""
    present = Settings(batch_size=8, accumulation_steps=8)
    knobs = ["optimizer_impl"]
    other, _, _ = tuned(present, 100, knobs=knobs, error_mib=40)
    assert other.now is None
    result, _, _ = tuned(present, 100, knobs=knobs, error_mib=40, running=present)
    assert result.now is not None
    assert result.now.tight
    assert result.best is result.now
    assert "That is tight" in result.why


def test_what_runs_already_and_needs_more_in_whole_steps_does_not_fit() -> None:
    present = Settings(batch_size=8, accumulation_steps=8)
    result, _, _ = tuned(present, 100, knobs=["optimizer_impl"], more=lambda settings: 2.0, running=present)
    assert result.now is None
    assert result.best is None


def test_another_global_batch_is_named_where_nothing_is_faster_than_what_it_begins_with() -> None:
    def alike(settings: Settings) -> float:
        return 1.0

    result, _, _ = tuned(Settings(batch_size=32), 600, step_s=alike, global_batch=14)
    assert result.best is result.now
    assert result.why.startswith("batch_size 32 → 7: 14 ± 0 samples/s with ")
    assert ". It changes the mathematics (batch_size). Of what was measured, that is the fastest that fits. None" in (
        result.why
    )


def test_the_only_one_that_was_measured_says_what_it_does_to_the_mathematics() -> None:
    result, _, _ = tuned(Settings(batch_size=32), 600, seconds=0.11, global_batch=14)
    [_] = result.measured
    assert result.why.startswith("batch_size 32 → 7: ")
    assert "It changes the mathematics (batch_size). It is the only one that was measured" in result.why
    result, _, _ = tuned(Settings(batch_size=64), 300, seconds=1.0)
    assert "but for batch norm" in replace(result, splits=Splits(True, mean=True)).why
    result, _, _ = tuned(Settings(batch_size=32), 600, seconds=0.11)
    assert result.why.startswith("as it is: ")
    assert "mathematics" not in result.why


def test_a_named_knob_that_has_no_other_value_is_told_beside_those_that_have() -> None:
    workload = replace(WORKLOAD, blocks=0)
    result, _, choice = tuned(Settings(batch_size=8), 600, workload=workload, knobs=["checkpointing", "batch_size"])
    assert choice.knobs == ("batch_size", "accumulation_steps")
    assert "Left out: checkpointing has no other value with what is loaded: the model has no blocks" in str(result)
    result, _, _ = tuned(Settings(batch_size=8), 600, workload=workload)
    assert "checkpointing has" not in str(result), "nobody named it"


def test_where_there_is_nothing_to_choose_that_is_said() -> None:
    result, _, choice = tuned(Settings(batch_size=32), 600, seconds=0.11)
    alone = replace(result, space=replace(choice, candidates=(choice.start,)))
    assert "It is the only one that was measured: there is nothing else to choose from." in alone.why


def test_where_the_update_needs_too_much_another_way_of_it_comes_before_other_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def needs(settings: Settings) -> int:
        return 10 * MIB + bytes_of(settings) + (0 if settings.optimizer_impl == "fused" else 200 * MIB)

    def in_update(settings: Settings, *of: Any) -> Prediction:
        return replace(said_of(settings, *of), phase="forward" if settings.optimizer_impl == "fused" else "update")

    monkeypatch.setattr(tuned_machine, "bytes_of", needs)
    monkeypatch.setattr(tuned_machine, "said_of", in_update)
    result, machine, _ = tuned(Settings(batch_size=8, accumulation_steps=8), 150)
    assert result.best is not None
    assert result.best.settings.optimizer_impl == "fused"
    assert machine.measured[0].optimizer_impl == "fused"
    before = list(machine.record.candidates).index(machine.measured[0])
    assert all(one.checkpointing == "none" for one in list(machine.record.candidates)[:before]), "nor by recomputing"


def test_a_search_knows_what_it_may_split_though_others_wait_for_the_ranks() -> None:
    cluster = MagicMock()
    cluster.history, cluster.foreground.busy = History(2), True  # the panel asks what flips would need
    cluster.training.workload = WORKLOAD
    cluster.foreground.call_alone.return_value = [False, False]
    predicting = Predicting(cluster)
    whole, parts = Settings(batch_size=8), Settings(batch_size=4, accumulation_steps=2)
    assert predicting.splits(whole, parts).mean is None, "of one flip it is said as a possibility"
    assert predicting.splits().mean is False
    assert predicting.splits(whole, parts).mean is False
    cluster.history.model_may_have_changed()
    assert predicting.known_splits.mean is None


def test_what_runs_stays_tight_where_the_largest_sample_may_not_fit() -> None:
    """Whole steps are taken with the next samples."""
    settings, limit = Settings(batch_size=8), 120 * MIB
    small = replace(said_of(settings, 100 * MIB, limit), high_bytes=200 * MIB, verdict=TIGHT, sample="3 is large.")
    candidate = Candidate(settings, replace(small, runs=True))
    for size in (90, 110):
        candidate.took_steps(replace(said_of(settings, size * MIB, limit), samples_per_s=50.0, runs=True))
        assert (candidate.usable, candidate.tight) == (True, True)
        assert (candidate.predicted.high_bytes, candidate.predicted.sample) == (200 * MIB, "3 is large.")
