"""Figures sum up the steps that they name: those of one call, one configuration, one model, one rank."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_nb.kernel.history import History
from gpumem_nb.kernel.training.state import TrainingState
from gpumem_nb.planning.instead import may_free
from gpumem_nb.planning.prediction import FITS, Prediction
from gpumem_nb.planning.score import Asked, foretold, score
from gpumem_nb.report.run_summary import Run
from gpumem_nb.report.scaling import Scaled, ScalingReport
from gpumem_nb.report.step_time import TimeReport
from gpumem_nb.shared.messages import Reading, Sample
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.step_times import FORWARD, StepTimes
from gpumem_nb.shared.workload import Handles
from gpumem_nb.ui import wording
from gpumem_nb.ui.pictures import common_limit
from gpumem_nb.ui.series import peaks
from tests.ledgers import MIB, ledger, reading, sample, waits
from tests.runs import runs_of

NOW = Settings()


def steps(history: History, rates: Sequence[float], settings_id: int = 1, **changed: Any) -> list[Sample]:
    """One step of one rank for each rate, which the history takes in."""
    found = [
        sample(history.steps + number, samples_per_s=rate, settings_id=settings_id, **changed)
        for number, rate in enumerate(rates, start=1)
    ]
    history.add(found, [reading()] * history.size)
    return found


@pytest.fixture
def history() -> History:
    """Of one rank that has loaded something and waits for its first step."""
    found = History(1)
    found.begin(1, "mine", NOW)
    found.mark("load", "mine")
    return found


def test_a_run_is_summed_up_by_its_own_steps(history: History) -> None:
    steps(history, [1100.0] * 60, live_peak_bytes=116 * MIB)
    own = steps(history, [120.0] * 8, live_peak_bytes=17 * MIB, loss=0.5)
    text = str(Run(own, {1: NOW}, []))
    assert text == "8 steps on 1 rank: loss 0.5, 120 samples/s, live peak 17.0 MiB."
    assert str(Run(own[:1], {1: NOW}, [])).startswith("1 step on 1 rank: ")
    state = TrainingState(history)
    assert state.recorded_so_far() == ""
    state.start_recording()
    state.record([sample(1, live_peak_bytes=90 * MIB), *(sample(step, samples_per_s=10.0) for step in range(2, 99))])
    assert state.recorded_so_far() == "step 98, loss 1, 10 samples/s, live peak 90.0 MiB"
    state.start_recording()
    assert state.recorded_so_far() == "", "of this call nothing was done yet"


def test_the_peak_of_a_configuration_is_its_highest_and_its_reserved_bytes_too(history: History) -> None:
    steps(history, [9.0], live_peak_bytes=116 * MIB, reserved_peak_bytes=130 * MIB)  # which warms up
    steps(history, [9.0] * 200)
    tried = history.tried[-1]
    assert (tried.peak_bytes, tried.reserved_peak_bytes) == (116 * MIB, 130 * MIB)
    for settings_id in range(2, 8):
        history.begin(settings_id, "mine", NOW.replace(batch_size=settings_id))
    steps(history, [9.0], live_peak_bytes=117 * MIB)  # it was under way for long
    assert (tried.settled, tried.peak_bytes, tried.steps) == (True, 117 * MIB, 202)
    assert tried.samples_per_s == 9


def test_a_cell_that_ran_begins_the_configuration_anew(history: History) -> None:
    steps(history, [1100.0] * 60, live_peak_bytes=16 * MIB)
    history.model_may_have_changed()
    assert len(runs_of(history)[1]) == 1, "nothing is different before a step was done"
    steps(history, [120.0] * 8, live_peak_bytes=116 * MIB)
    before, now = runs_of(history)[1]
    assert (before.steps, before.samples_per_s, before.peak_bytes, before.present) == (60, 1100, 16 * MIB, False)
    assert (now.steps, now.samples_per_s, now.peak_bytes, now.present) == (8, 120, 116 * MIB, True)
    assert before.key != now.key
    assert "116.0 MiB" in tiles(history)
    assert ">120<" in tiles(history)
    assert history.steps_since_load == 68
    history.model_may_have_changed()
    history.failed(1, "oom")
    assert [row.outcome for row in runs_of(history)[1]] == ["ok", "ok", "oom"], "what went well before stays so"
    assert history.effect() is None, "no setting was changed"


def test_steps_of_before_a_cell_do_not_count_with_those_after_it(history: History) -> None:
    steps(history, [1.0] * 5)
    history.model_may_have_changed()
    late = [sample(step, time_s=history.now_s() - 1) for step in (6, 7)]  # whose answer comes after the cell's
    history.add(late, [reading()])
    assert [one.steps for one in history.tried] == [7]
    assert history.changed_after == 7
    steps(history, [1.0])
    assert [one.steps for one in history.tried] == [7, 1]
    history.begin(2, "mine", NOW.replace(batch_size=8))
    steps(history, [1.0])
    assert [one.settings_id for one in history.tried] == [1, 1, 2], "settings that were left are not begun anew"


def predicted(history: History, peak: int, settings: Settings = NOW) -> None:
    said = Prediction(settings, peak, peak, None, peak, peak, None, FITS, {}, "forward", "", "", 0.1)
    history.predicted(Asked(said, history.model_version, NOW, history.begun))


def test_a_prediction_is_held_against_steps_of_the_model_that_it_was_about(history: History) -> None:
    steps(history, [9.0] * 6, live_peak_bytes=100 * MIB)
    history.model_may_have_changed()
    predicted(history, 61 * MIB)
    assert not score(history.asked, history.tried).scored
    steps(history, [9.0] * 6, live_peak_bytes=61 * MIB)
    (one,) = score(history.asked, history.tried).scored
    assert one.error == 0
    assert foretold(history.asked, history.tried, history.tried[-1]) is one.predicted
    rows = list(runs_of(history)[1])
    assert [row.foretold and row.foretold.error for row in rows] == [None, 0]


def tiles(history: History, readings: Sequence[Reading | None] | None = None) -> str:
    settings = history.tried[-1].settings
    session: Any = SimpleNamespace(history=history, size=history.size, workload=None, settings=settings)
    return wording.tiles(session, history.readings if readings is None else readings)


def test_a_peak_is_of_steps_that_were_done_of_what_is_loaded_under_these_settings(history: History) -> None:
    assert "…</b><span>peak, of 96.0 MiB" in tiles(history, [reading()])
    steps(history, [9.0] * 6, live_peak_bytes=48 * MIB)
    assert "48.0 MiB</b><span>peak, 50% of 96.0 MiB" in tiles(history)
    assert "<b>3.56 s</b><span>step" in tiles(history), "of 32 samples"
    history.begin(2, "mine", NOW.replace(batch_size=64))  # while paused: the device has a peak of its own by then
    assert "…</b><span>peak, of 96.0 MiB" in tiles(history, [reading(13 * MIB)])
    steps(history, [9.0], settings_id=2, live_peak_bytes=72 * MIB)
    history.begin(3, "other", NOW)
    history.mark("load", "other")
    assert "…</b><span>peak, of 96.0 MiB" in tiles(history, [reading(72 * MIB)])


def test_how_long_ranks_wait_and_for_whom_is_told_beside_the_time_of_a_step(history: History) -> None:
    steps(history, [9.0] * 6)
    session: Any = SimpleNamespace(history=history, size=2, workload=None, settings=NOW)

    def told(*waiting_s: float) -> str:
        rows = [[sample(step, rank, times=waits(s)) for step in range(1, 9)] for rank, s in enumerate(waiting_s)]
        return wording.tiles(session, [], TimeReport.of(rows))

    assert "<span>step, 40 % waiting for rank 1</span>" in told(0.05, 0.01)
    assert "<span>step, 30 % waiting</span>" in told(0.03, 0.03)
    assert "<span>step</span>" in told(0.0), "one rank waits for nobody"


def test_each_ranks_peak_is_told_beside_its_own_limit() -> None:
    history = History(2)
    history.begin(1, "mine", NOW)
    of_ranks = [sample(1, 0, live_peak_bytes=60 * MIB), sample(1, 1, live_peak_bytes=45 * MIB)]
    history.add(of_ranks, [reading(60 * MIB, 100 * MIB), reading(45 * MIB, 50 * MIB)])
    assert "45.0 MiB</b><span>peak, 90% of 50.0 MiB" in tiles(history)
    assert history.tried[0].peak_bytes == 60 * MIB
    assert common_limit(history.readings) is None, "no line goes through the bars of other ranks"
    assert common_limit([reading(), None, reading()]) == 96 * MIB
    assert common_limit([]) is None


def test_reserved_bytes_of_a_peak_are_those_of_its_step_on_every_rank() -> None:
    recorded = sample(5, 0, ledger(), reserved_peak_bytes=50 * MIB)
    rows = [
        [recorded, sample(6, 0, live_peak_bytes=39 * MIB, reserved_peak_bytes=39 * MIB)],
        [sample(6, 1, live_peak_bytes=70 * MIB, reserved_peak_bytes=60 * MIB)],
        [],
    ]
    found = peaks(rows, [reading(13 * MIB), None, reading()])
    assert [(peak.bytes, peak.reserved) for peak in found] == [
        (40 * MIB, 50 * MIB),
        (70 * MIB, 70 * MIB),
        (40 * MIB, 48 * MIB),
    ]
    assert all(peak.reserved >= peak.bytes for peak in found)


def test_what_a_step_before_a_cell_was_made_of_says_nothing_of_steps_after_it(history: History) -> None:
    steps(history, [9.0] * 3, recorded=ledger())
    history.model_may_have_changed()
    assert history.since_cell(history.of_loaded())[0][-1].ledger, "there is nothing newer"
    steps(history, [9.0] * 3, live_peak_bytes=80 * MIB)
    (peak,) = peaks(history.of_loaded(), history.readings, history.changed_after)
    assert (peak.bytes, peak.ledger) == (80 * MIB, None)
    assert not any(one.ledger for one in history.since_cell(history.of_loaded())[0])
    (before,) = peaks(history.of_loaded(), history.readings)
    assert before.ledger


def test_a_flip_is_told_beside_a_cell_that_ran_in_between(history: History) -> None:
    steps(history, [9.0] * 6)
    history.begin(2, "mine", NOW.replace(batch_size=8))
    steps(history, [9.0] * 6, settings_id=2)
    assert "a cell" not in str(history.effect())
    history.model_may_have_changed()
    steps(history, [9.0] * 6, settings_id=2)
    effect = history.effect()
    assert effect
    assert "a cell that ran in between may have changed the model" in str(effect)
    assert "a cell that ran in between" in wording.effect(effect)


def test_what_settings_needed_of_another_model_is_no_advice_for_this_one(history: History) -> None:
    blocks = NOW.replace(checkpointing="blocks")
    history.begin(2, "mine", blocks)
    steps(history, [9.0] * 6, settings_id=2, live_peak_bytes=10 * MIB)
    history.begin(3, "mine", NOW)
    steps(history, [9.0] * 6, settings_id=3, live_peak_bytes=40 * MIB)

    def said() -> str:
        return may_free("activations", "forward", history.now(), history.tried, Handles(4))

    assert "had a peak of 10.0 MiB" in said()
    history.begin(4, "mine", NOW)
    assert "had a peak of 10.0 MiB" in said(), "an interrupt changes nothing"
    steps(history, [9.0] * 6, settings_id=4, live_peak_bytes=40 * MIB)
    history.model_may_have_changed()
    steps(history, [9.0] * 6, settings_id=4, live_peak_bytes=80 * MIB)
    assert "had a peak of" not in said()


def waiting(queued_s: float | None, of_gpu: bool = False) -> StepTimes:
    """Of a step of 100 ms in which the rank had no core for so long."""
    return StepTimes.of({FORWARD: 0.1}, 0.0, queued_s=queued_s, of_device=of_gpu)


@pytest.mark.parametrize(
    ("queued_s", "of_gpu", "comparable"),
    [(0.084, False, False), (0.02, False, False), (0.005, False, True), (None, False, True), (0.084, True, True)],
)
def test_speeds_are_not_compared_where_ranks_waited_for_a_core(
    history: History, queued_s: float | None, of_gpu: bool, comparable: bool
) -> None:
    steps(history, [100.0] * 20, times=waiting(0.001))
    history.begin(2, "mine", NOW.replace(precision="bf16"))
    steps(history, [90.0] * 20, settings_id=2, times=waiting(queued_s, of_gpu))
    effect = history.effect()
    assert effect
    comparison = runs_of(history)[1].compare(1, 2)
    for text in (str(effect), wording.effect(effect), str(comparison)):
        assert ("−10 %" in text) == comparable
        assert ("not comparable: machine busy" in text) != comparable
    assert ("A step" in " ".join(comparison.why)) == comparable
    row = runs_of(history)[1][2]
    assert type(row).from_saved(row.saved()).speed == row.speed


def test_a_forecast_is_less_certain_the_farther_it_goes_and_the_more_the_model_missed() -> None:
    def measured(ranks: int, step_s: float) -> Scaled:
        times = StepTimes.of({FORWARD: step_s}, 0.0)
        return Scaled(ranks, ((times,) * 6,) * ranks, 32 * ranks)

    even = ScalingReport((measured(1, 0.1), measured(2, 0.1), measured(4, 0.1)), None, MIB, (), 1)
    assert [even.forecast(ranks)[1] for ranks in (8, 16, 64)] == pytest.approx([0.1, 0.2, 0.4])
    missed = ScalingReport((measured(1, 0.1), measured(2, 0.1), measured(4, 0.2)), None, MIB, (), 1)
    assert [missed.forecast(ranks)[1] for ranks in (8, 16)] == pytest.approx([1.0, 2.0])
