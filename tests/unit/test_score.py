"""What was predicted is held against what came, of the same workload and the same memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumem_nb.kernel.history import History
from gpumem_nb.planning.fit import Missed, settled
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, TIGHT, Prediction
from gpumem_nb.planning.score import Asked, foretold, score
from gpumem_nb.report.configurations import Effect, Tried
from gpumem_nb.shared.messages import Reading, Sample
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui.wording import effect

NOW = Settings()
MIB = 2**20
READING = Reading(1, 1, 2, 2, None, None)


def sample(step: int, settings_id: int, peak_mib: int) -> Sample:
    peak = peak_mib * MIB
    return Sample(0, step, float(step), 1.0, 0.1, 10.0, 1, peak, 2, peak, None, settings_id, "")


def predicted(peak_mib: int, verdict: str = FITS, version: int = 0, begun: int = 1, **knobs: Any) -> Asked:
    peak = peak_mib * MIB
    wanted = NOW.replace(**knobs)
    one = Prediction(wanted, peak, peak, None, peak, peak, None, verdict, {}, "forward", "", "", 0.1)
    return Asked(one, version, NOW, begun)


def came(settings_id: int, peak_mib: int | None, version: int = 0, **knobs: Any) -> Tried:
    tried = Tried(settings_id, "mine", NOW.replace(**knobs), version)
    if peak_mib is None:
        tried.outcome = "oom"
    else:
        tried.steps, tried.outcome, tried.peak_bytes = 3, "ok", peak_mib * MIB
    return tried


def test_a_prediction_meets_the_first_configuration_that_takes_the_same_memory() -> None:
    asked = [predicted(99, batch_size=64), predicted(101, batch_size=64), predicted(50, batch_size=8)]
    board = score(asked, [came(0, 60), came(1, 100, batch_size=64, learning_rate=0.5), came(2, 90, batch_size=64)])
    (one,) = board.scored
    assert (one.flip, one.came.settings_id) == ("batch_size 32 → 64", 1)
    assert one.error == 99 / 100 - 1, "the first prediction counts"
    assert "1 of 1 verdicts right, 1.0 % off in the median" in str(board)


def test_of_predictions_of_the_same_memory_that_of_the_very_settings_counts() -> None:
    asked = [predicted(99), predicted(98, num_workers=2), predicted(97, num_workers=2), predicted(96, num_workers=4)]
    (one,) = score(asked, [came(0, 60), came(1, 100, num_workers=2)]).scored
    assert one.predicted is asked[1].prediction
    assert one.samples_per_s is None
    asked[1] = replace(asked[1], prediction=replace(asked[1].prediction, samples_per_s=150.0))
    (one,) = score(asked, [came(0, 60), came(1, 100, num_workers=2)]).scored
    assert one.samples_per_s == 150
    (one,) = score(asked[1:2], [came(0, 60), came(1, 100, num_workers=4)]).scored
    assert one.predicted is asked[1].prediction, "it needs the same memory"
    assert one.samples_per_s is None, "but it is not as fast"


def test_another_model_and_what_came_before_are_not_meant() -> None:
    asked = [predicted(99, batch_size=64, begun=2)]
    assert not score(asked, [came(0, 99, batch_size=64), came(1, 60)]).scored
    assert not score(asked, [came(0, 60), came(1, 60), came(2, 99, version=1, batch_size=64)]).scored


def test_what_a_configuration_takes_once_the_model_may_have_changed_was_not_predicted() -> None:
    history = History(1)
    history.begin(1, "mine", NOW)
    history.mark("load", "mine")
    assert history.begun == 0, "it waits for its first step"
    history.predicted(Asked(predicted(99).prediction, history.model_version, NOW, history.begun))
    history.add([sample(step, 1, peak_mib=100) for step in range(8)], [READING])
    assert history.begun == 1
    history.predicted(Asked(predicted(100).prediction, history.model_version, NOW, history.begun))
    history.model_may_have_changed()
    history.add([sample(step, 1, peak_mib=400) for step in range(8, 16)], [READING])
    (one,) = score(history.asked, history.tried).scored
    assert one.error == 99 / 100 - 1
    history.predicted(Asked(predicted(500, batch_size=64).prediction, history.model_version, NOW, history.begun))
    history.begin(2, "mine", NOW.replace(batch_size=64))
    history.model_may_have_changed()
    history.add([sample(step, 2, peak_mib=800) for step in range(16, 24)], [READING])
    assert len(score(history.asked, history.tried).scored) == 1, "it was changed before the first step"
    assert foretold(history.asked, history.tried, history.tried[-1]) is None


def test_whether_it_fits_counts_too() -> None:
    asked = [predicted(99, batch_size=64), predicted(999, DOES_NOT_FIT, batch_size=128), predicted(9, batch_size=256)]
    tried = [came(0, 60), came(1, None, batch_size=64), came(2, None, batch_size=128), came(3, 9, batch_size=256)]
    board = score(asked, tried)
    assert [(one.right, one.error) for one in board.scored] == [(False, None), (True, None), (True, 0)]
    assert "2 of 3 verdicts right" in str(board)
    assert list(board.frame().right) == [False, True, True]


def test_what_was_predicted_for_what_is_tried_now_was_said_before_it_was_tried() -> None:
    now = came(3, 100, batch_size=64, learning_rate=0.5)
    tried = [came(0, 60), now]
    asked = [predicted(101, batch_size=64), predicted(99, batch_size=64, begun=2), predicted(50, version=1)]
    assert foretold(asked, tried, now) is asked[0].prediction
    again = came(4, 100, batch_size=64)
    assert foretold(asked, [*tried, again], again) is asked[1].prediction, "said before it was tried again"
    other = came(4, 100)
    assert foretold(asked, [*tried, other], other) is None
    told = effect(Effect(came(0, 60), now), asked[0].prediction)
    assert "predicted <b>101.0 MiB</b>, measured <b>100.0 MiB</b>" in told


def test_nothing_to_show_is_a_sentence() -> None:
    assert "Predict a flip with %hvd_predict" in str(score([], []))


def with_error(one: Asked, limit_mib: int, share: float = 0.02) -> Asked:
    reserved = one.prediction.reserved_peak_bytes
    low, high = round(reserved * (1 - share)), round(reserved * (1 + share))
    prediction = replace(one.prediction, low_bytes=low, high_bytes=high, limit_bytes=limit_mib * MIB)
    return replace(one, prediction=prediction)


def test_a_prediction_that_missed_widens_the_next_ones_of_that_model() -> None:
    asked = with_error(predicted(100, batch_size=64), limit_mib=120)
    for peak_mib, missed in (
        (101, (0.0, 0.0)),
        (110, (0.0, 0.1)),
        (75, (-0.25, 0.0)),
        (None, (0.0, 0.2)),
        (300, (0, 0.5)),
    ):
        board = score([asked], [came(0, 60), came(1, peak_mib, batch_size=64)])
        assert board.missed(0) == pytest.approx(missed), peak_mib
        assert board.missed(1) == (0.0, 0.0), "of another model"
    following = with_error(predicted(100, batch_size=32), limit_mib=120).prediction
    assert settled(following, Missed(-0.01, 0.02)) is following
    wider = settled(following, Missed(0.0, 0.25))
    assert (wider.low_bytes, wider.high_bytes, wider.verdict) == (98 * MIB, 125 * MIB, TIGHT)
    assert "the 25 % by which an earlier prediction of this model missed" in str(wider)
    too_large = replace(following, verdict=DOES_NOT_FIT, limit_bytes=90 * MIB)
    assert settled(too_large, Missed(0.0, 0.25)).verdict == DOES_NOT_FIT, "more than was predicted does not fit either"
    assert settled(too_large, Missed(-0.25, 0.0)).verdict == TIGHT
    at_least = replace(following, verdict=DOES_NOT_FIT, low_bytes=100 * MIB, high_bytes=100 * MIB,
                       lower_bound=True)  # fmt: skip
    assert settled(at_least, Missed(-0.25, 0.25)) is at_least
    nothing = replace(asked, prediction=replace(asked.prediction, reserved_peak_bytes=0, live_peak_bytes=0))
    assert score([nothing], [came(0, 60), came(1, 75, batch_size=64)]).missed(0) == (0.0, 0.0)


def test_by_how_much_a_lower_bound_was_off_is_not_known() -> None:
    asked, tried = predicted(130, DOES_NOT_FIT, batch_size=64), came(1, 90, batch_size=64)
    bound = replace(asked, prediction=replace(asked.prediction, lower_bound=True))
    tried.outcome = "oom"
    board = score([bound], [came(0, 60), tried])
    assert board.scored[0].error is None
    assert "1 of 1 verdicts right\n" in str(board)
    assert "more than 130.0 MiB" in str(board)
