"""Runs whose losses run away: they are recorded like any other, and never called the best."""

from __future__ import annotations

import math
from dataclasses import replace

from gpumem_nb.kernel.logging.target import of_step
from gpumem_nb.report.evaluation import Evaluation
from gpumem_nb.report.run_summary import Run
from gpumem_nb.report.runs.stored import packed, unpacked
from gpumem_nb.shared.messages import ChunkReply, Evaluated
from gpumem_nb.shared.settings import Settings
from tests.ledgers import MIB, reading, sample
from tests.runs import LIMITS, cells, history_of, runs_of, shown, train

INF, NAN = math.inf, math.nan


def test_losses_that_run_away_to_both_sides_do_not_end_training() -> None:
    history = history_of()
    history.begin(1, "critic", Settings())
    for step in range(1, 601):
        sign = 1 if step % 2 else -1
        both = [sample(step, rank, loss=sign * INF, settings_id=1) for rank in range(2)]
        if step == 1:
            both[1] = replace(both[1], loss=-INF)
        history.add(both, [reading(limit=limit) for limit in LIMITS])  # joins points of both signs, too
        if step == 1:
            assert history.tried[0].loss is not None
            assert math.isnan(history.tried[0].loss)
            assert math.isnan(of_step(both)["loss/mean"])
            assert "loss nan" in str(Run(both, {1: Settings()}, history.configuration, []))
    assert history.steps == 600
    assert str(runs_of(history)[1])


def test_an_evaluation_that_runs_away_to_both_sides_is_not_a_number() -> None:
    sums = [Evaluated(rank, 1, 0.0, 1, 8, {"loss": (1 - 2 * rank) * INF}, 0.1, MIB) for rank in range(2)]
    found = Evaluation.of_ranks([ChunkReply(rank, (), reading(), evaluated=sums[rank]) for rank in range(2)])
    assert found
    assert math.isnan(found.loss)


def test_a_run_that_ran_away_says_so_and_is_not_the_best() -> None:
    history = history_of()
    train(history, Settings(), [2.0] * 10)
    train(history, Settings(precision="fp16"), [2.0] * 4 + [NAN] * 6, rates=(900.0,))
    train(history, Settings(precision="bf16"), [2.0, INF, -INF, 1.0, INF] * 2, rates=(800.0,))
    record, runs = runs_of(history)
    assert [row.ran_away for row in runs] == [False, True, True]
    assert cells(runs, "mark") == ["best", "", "now"]
    assert cells(runs, "loss") == ["2", "nan", "nan"]
    assert [row.number for row in runs.sorted("loss_at_equal_samples")] == [1, 2, 3]
    two = runs.compare(1, 2)
    assert "nan" in str(two)
    assert "nan %" not in str(two)
    later, _ = runs_of()
    later.bring(unpacked(packed(record.rows()))[0], "a.state")
    assert cells(shown(later), "loss") == ["2", "nan", "nan"], "also from a file"
    train(history, Settings(precision="fp16", checkpointing="blocks"), [2.0] * 200 + [NAN])
    assert cells(runs_of(history)[1], "loss")[-1] == "2", "it had not by then"
