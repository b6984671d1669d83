"""What was predicted is held against what came, of the same workload and the same memory."""

from __future__ import annotations

from collections import deque
from typing import Any

from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS, Prediction
from gpumem_nb.planning.score import Asked, foretold, score
from gpumem_nb.report.configurations import Effect, Tried
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui.wording import effect

NOW = Settings()
MIB = 2**20


def predicted(peak_mib: int, verdict: str = FITS, workload: str = "mine", begun: int = 1, **knobs: Any) -> Asked:
    peak = peak_mib * MIB
    wanted = NOW.replace(**knobs)
    one = Prediction(wanted, peak, peak, None, peak, peak, None, verdict, {}, "forward", "", "", 0.1)
    return Asked(one, workload, NOW, begun)


def came(settings_id: int, peak_mib: int | None, workload: str = "mine", **knobs: Any) -> Tried:
    tried = Tried(settings_id, workload, NOW.replace(**knobs))
    if peak_mib is None:
        tried.outcome = "oom"
    else:
        tried.steps, tried.outcome, tried.peaks = 3, "ok", deque([peak_mib * MIB])
    return tried


def test_a_prediction_meets_the_first_configuration_that_takes_the_same_memory() -> None:
    asked = [predicted(99, batch_size=64), predicted(101, batch_size=64), predicted(50, batch_size=8)]
    board = score(asked, [came(0, 60), came(1, 100, batch_size=64, learning_rate=0.5), came(2, 90, batch_size=64)])
    (one,) = board.scored
    assert (one.flip, one.came.settings_id) == ("batch_size 32 → 64", 1)
    assert one.error == 101 / 100 - 1, "the latest prediction counts"
    assert "1 of 1 verdicts right, 1.0 % off in the median" in str(board)


def test_another_workload_and_what_came_before_are_not_meant() -> None:
    asked = [predicted(99, batch_size=64, begun=2)]
    assert not score(asked, [came(0, 99, batch_size=64), came(1, 60)]).scored
    assert not score(asked, [came(0, 60), came(1, 60), came(2, 99, workload="other", batch_size=64)]).scored


def test_whether_it_fits_counts_too() -> None:
    asked = [predicted(99, batch_size=64), predicted(999, DOES_NOT_FIT, batch_size=128), predicted(9, batch_size=256)]
    tried = [came(1, None, batch_size=64), came(2, None, batch_size=128), came(3, 9, batch_size=256)]
    board = score(asked, tried)
    assert [(one.right, one.error) for one in board.scored] == [(False, None), (True, None), (True, 0)]
    assert "2 of 3 verdicts right" in str(board)
    assert list(board.frame().right) == [False, True, True]


def test_what_was_predicted_for_what_is_tried_now_is_the_latest_that_was_said_of_it() -> None:
    asked = [predicted(99, batch_size=64), predicted(101, batch_size=64), predicted(50, workload="other")]
    now = came(3, 100, batch_size=64, learning_rate=0.5)
    assert foretold(asked, now) is asked[1].prediction
    assert foretold(asked, came(4, 100)) is None
    assert "predicted <b>101.0 MiB</b>, came <b>100.0 MiB</b>" in effect(Effect(came(0, 60), now), asked[1].prediction)


def test_nothing_to_show_is_a_sentence() -> None:
    assert "Predict a flip with %hvd_predict" in str(score([], []))
