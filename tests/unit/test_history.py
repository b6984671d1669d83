from __future__ import annotations

from gpumem_nb.kernel.history import Entry, History
from gpumem_nb.planning.score import Asked
from gpumem_nb.report.configurations import Tried
from gpumem_nb.shared.messages import Ledger, Reading, Sample
from gpumem_nb.shared.settings import Settings
from tests.unit.test_doctor import prediction

READING = Reading(1, 1, 2, 2, None, None)


def sample(step: int, settings_id: int, step_s: float = 0.1, ledger: Ledger | None = None) -> Sample:
    speed, peak = 10.0 * settings_id, 100 + settings_id
    return Sample(0, step, float(step), 1.0, step_s, speed, 1, peak, 2, peak, None, settings_id, "", ledger)


def test_figures_of_old_configurations_stay_when_their_steps_are_let_go() -> None:
    history = History(1)
    for settings_id in range(1, 11):
        history.begin(settings_id, "w", Settings())
        steps = [sample(4 * settings_id + step, settings_id) for step in range(4)]
        history.add(steps, [Reading(1, 1, 2, 2, None, None)])
    assert [tried.peak_bytes for tried in history.tried] == [101 + index for index in range(10)]
    assert [tried.samples_per_s for tried in history.tried] == [10.0 * index for index in range(1, 11)]
    assert [tried.steps for tried in history.tried] == [4] * 10
    assert [len(tried.throughputs) for tried in history.tried] == [0] * 7 + [2] * 3


def test_only_what_was_measured_of_what_is_loaded_can_be_compared_with() -> None:
    def train(settings_id: int, settings: Settings, steps: int = 8) -> None:
        history.begin(settings_id, "w", settings)
        history.add([sample(10 * settings_id + step, settings_id) for step in range(steps)], [READING])

    history = History(1)
    assert not history.pin(True), "there is nothing yet"
    history.begin(1, "w", Settings())
    history.mark("load", "w")
    assert not history.pin(True), "no step was done"
    train(2, Settings(precision="bf16"))
    assert history.pin(True)
    train(3, Settings(batch_size=16))
    train(4, Settings(batch_size=8))
    effect = history.effect()
    assert effect
    assert (effect.pinned, effect.flip) == (True, "precision bf16 → fp32, batch_size 32 → 8")
    history.pin(False)
    effect = history.effect()
    assert effect
    assert (effect.pinned, effect.flip) == (False, "batch_size 16 → 8")
    history.pin(True)
    history.begin(5, "w", Settings())
    history.mark("load", "w")
    assert history.pinned is None
    train(6, Settings(batch_size=64))
    assert history.effect() is None, "what was loaded before is another model, whatever its name"


def test_settings_that_go_on_under_another_number_keep_their_figures() -> None:
    history = History(1)
    history.begin(1, "w", Settings())
    history.add([sample(step, 1) for step in range(8)], [READING])
    history.begin(2, "w", Settings())  # as after an interrupt
    now = history.now()
    assert now
    assert (now.settings_id, now.steps) == (1, 8)
    history.begin(3, "w", Settings(batch_size=8))
    now = history.now()
    assert now
    assert (now.settings_id, now.steps) == (3, 0)


def test_logs_are_told_once_more_what_trains_when_autotune_has_ended() -> None:
    told: list[Entry] = []
    history = History(1, told.append)
    history.begin(1, "w", Settings())
    history.tries(2, "w", Settings(bucket_mib=4.0))
    history.autotune_ended("None of 1 other settings was clearly faster.")
    configurations = [entry.what for entry in told if isinstance(entry.what, Tried)]
    assert [one.settings_id for one in configurations] == [1, 2, 1]


def test_what_was_foreseen_of_other_optimizers_is_asked_again_once_ones_own_has_its_state_beside_them() -> None:
    own, sgd = Settings(optimizer="own"), Settings(optimizer="sgd")
    history = History(1)
    history.begin(1, "w", own)
    for settings in (own, sgd):
        history.predicted(Asked(prediction(settings), history.model_version, own, 0))
    version = history.foreseen_version
    history.add([sample(1, 1)], [READING])
    assert list(history.foreseen) == [own]
    assert history.foreseen_version > version
    history.predicted(Asked(prediction(sgd), history.model_version, own, 0))
    history.add([sample(2, 1)], [READING])
    assert list(history.foreseen) == [own, sgd]
