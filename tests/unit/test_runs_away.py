"""Runs whose losses run away: they are recorded like any other, and never called the best."""

from __future__ import annotations

import math
from dataclasses import replace

from gpumem_nb.kernel.logging.target import of_step
from gpumem_nb.report.evaluation import Evaluation
from gpumem_nb.report.run_summary import Run
from gpumem_nb.shared.messages import ChunkReply, Evaluated
from gpumem_nb.shared.settings import Settings
from tests.ledgers import MIB, reading, sample
from tests.runs import LIMITS, history_of, runs_of

INF = math.inf


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
