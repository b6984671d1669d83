"""Two runs side by side: what moved, and what that is put down to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_nb.planning.prediction import DOES_NOT_FIT, Prediction
from gpumem_nb.planning.score import Asked
from gpumem_nb.report.runs import Row
from gpumem_nb.report.runs.comparing import Comparison
from gpumem_nb.shared.settings import Settings
from tests.ledgers import MIB, ledger
from tests.runs import cells, history_of, runs_of, train

TEN = [2.0] * 10


def test_a_comparison_says_what_moved_and_which_flip_moves_it() -> None:
    history = history_of()
    train(history, Settings(), [2.0] * 40, recorded=ledger(), rates=(100.0, 101.0))
    light = ledger(activations=2)
    other = Settings(checkpointing="blocks", learning_rate=0.01)
    train(history, other, [1.0] * 40, recorded=light, peak=22 * MIB, backward_s=0.07, rates=(80.0, 81.0))
    _, runs = runs_of(history)
    two = runs.compare(1, 2)
    assert next(iter(two.categories.items())) == ("activations", -18 * MIB)
    assert next(iter(two.parts)) == "backward"
    assert two.parts["backward"] == pytest.approx(0.02)
    assert two.why == [
        "Live peak −18.0 MiB: activations −18.0 MiB (checkpointing none → blocks).",
        "A step, +20.00 ms: backward +20.00 ms.",
    ]
    text = str(two)
    assert "Run 1 → 2: checkpointing none → blocks, learning_rate 0.001 → 0.01" in text
    assert "changes the mathematics (learning_rate)" in text
    assert "(−20 %" in text
    assert list(two.frame().columns) == ["what", "unit", "run 1", "run 2", "change"]
    assert runs.compare(1, 1).why == ["The live peak did not move.", "A step took as long, part by part."]


def test_a_comparison_says_which_of_the_two_failed() -> None:
    history = history_of()
    train(history, Settings(), TEN)
    for outcome in ("oom", "error"):
        train(history, Settings(batch_size=640), [])
        history.tried[-1].outcome = outcome
    _, runs = runs_of(history)
    assert "Run 2 ran out of memory." in str(runs.compare(1, 2))
    assert "Run 3 failed with an error." in runs.compare(3, 1)._repr_html_()
    assert " ran out of memory" not in str(runs.compare(1, 1))


def test_steps_of_other_sizes_are_compared_by_the_time_that_as_many_samples_take() -> None:
    history = history_of()
    train(history, Settings(batch_size=16), TEN, backward_s=0.05)
    train(history, Settings(batch_size=32), TEN, backward_s=0.05)
    _, runs = runs_of(history)
    assert runs.compare(1, 2).parts["backward"] == pytest.approx(-0.025)
    assert "for 32 samples" in str(runs.compare(1, 2))


def test_knobs_are_blamed_and_times_scaled_only_for_one_model_on_as_many_ranks() -> None:
    history = history_of()
    train(history, Settings(), TEN, recorded=ledger(), rates=(20_000.0,), parameters=1)
    other = Settings(checkpointing="blocks", batch_size=64)
    train(history, other, [3.0] * 20_010, recorded=ledger(activations=2), peak=22 * MIB, rates=(9000.5,), parameters=2)
    _, runs = runs_of(history)
    a, b = runs[1], runs[2]
    two = runs.compare(1, 2)
    assert "checkpointing" not in two.why[0]
    assert two.parts["backward"] == 0
    assert "for 64 samples" not in str(two)
    text = str(two)
    assert "+20,000 (" in text
    assert "−21,999 (−55 %)" in text
    assert "e+0" not in text
    alike = replace(b, parameters=1)
    assert "checkpointing none → blocks" in Comparison(a, alike).why[0]
    assert Comparison(a, alike).parts["backward"] == pytest.approx(-0.025)
    assert "checkpointing" not in Comparison(a, replace(alike, ranks=4)).why[0]


def test_what_the_mathematics_do_is_told_of_one_model_and_on_other_ranks_as_the_global_batch() -> None:
    history = history_of()
    train(history, Settings(batch_size=64), TEN, parameters=1)
    train(history, Settings(batch_size=32, accumulation_steps=2), TEN, parameters=1)
    _, runs = runs_of(history)
    a, b = runs[1], runs[2]
    assert "The change keeps the mathematics to rounding if the loss is a mean over samples." in str(Comparison(a, b))
    assert "but for batch norm, whose statistics come from micro-batches of 32" in str(
        Comparison(a, replace(b, batch_norm=True))
    )
    on_four = str(Comparison(a, replace(b, ranks=4)))
    assert "the mathematics" not in on_four
    flipped = replace(b, ranks=4, settings=b.settings.replace(precision="bf16"))
    assert "Apart from that, the change changes the mathematics (precision)." in str(Comparison(a, flipped))
    assert "On other ranks, steps have a global batch of 256 in place of 128." in on_four
    as_many = replace(b, ranks=4, settings=Settings(batch_size=32))
    assert "On other ranks, steps have a global batch of 128 as before." in str(Comparison(a, as_many))
    assert "the mathematics" not in str(Comparison(a, replace(b, parameters=2)))


def test_a_change_of_what_is_below_zero_or_endless_has_no_share() -> None:
    history = history_of()
    for loss in (-2.0, -3.0, float("inf")):
        train(history, Settings(), [loss] * 10)
    _, runs = runs_of(history)
    assert "%)" not in next(line for line in str(runs.compare(1, 2)).splitlines() if line.startswith("loss"))
    assert "nan" not in str(Comparison(runs[3], replace(runs[1], loss=float("inf"))))
    assert "Throughput" not in str(Comparison(replace(runs[1], speed=None), replace(runs[2], speed=None)))


def test_a_lower_bound_is_shown_as_one_and_held_against_nothing() -> None:
    history = history_of()
    train(history, Settings(), TEN)
    wanted = Settings(batch_size=64)
    said = Prediction(
        *(wanted, 130 * MIB, 130 * MIB, None, 130 * MIB, 130 * MIB, 100 * MIB, DOES_NOT_FIT),
        *({}, "forward", "", "", 0.1),
        lower_bound=True,
    )
    history.predicted(Asked(said, history.model_version, Settings(), history.begun))
    train(history, wanted, TEN, peak=90 * MIB)
    _, runs = runs_of(history)
    assert cells(runs, "predicted") == ["n/a", "more than 130.0 MiB"]
    assert Row.from_saved(runs.rows[1].saved()).foretold == runs.rows[1].foretold
    assert list(runs.frame().predicted_lower_bound) == [False, True]
    compared = runs.compare(1, 2)
    assert "more than 130.0 MiB" in str(compared)
    assert next(row for row in compared.records if row["what"] == "predicted")["run 2"] is None


def test_a_comparison_says_that_a_cell_in_between_may_have_changed_the_model() -> None:
    history = history_of()
    train(history, Settings(), TEN)
    train(history, Settings(batch_size=64), TEN)
    history.model_may_have_changed()
    train(history, Settings(batch_size=64), TEN)
    _, runs = runs_of(history)
    caveat = "A cell or a load in between may have changed the model or its data."
    assert [caveat in str(runs.compare(a, b)) for a, b in ((1, 2), (2, 3), (1, 3))] == [False, True, True]
    assert "Run 2 → 3: the same settings" in str(runs.compare(2, 3))
    assert Row.from_saved(runs[3].saved()).model_version == runs[3].model_version


def test_speeds_of_ranks_that_waited_for_a_core_are_not_called_the_best_without_a_word() -> None:
    history = history_of()
    for size in (16, 32):
        train(history, Settings(batch_size=size), TEN)
    _, runs = runs_of(history)
    assert "machine busy" not in str(runs)
    busy = replace(runs[2], speed=replace(runs[2].speed, starved=0.6))  # type: ignore[type-var]
    text = str(replace(runs, rows=[runs[1], busy]))
    assert (
        "samples/s and best are not comparable: machine busy, ranks waited for a core in 60 % of a step (run 2)."
        in text
    )
