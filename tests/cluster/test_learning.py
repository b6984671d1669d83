"""The ready-made workloads learn on four ranks under default settings, within a hundred steps and two minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gpumem_nb.session import Session
from gpumem_nb.workloads.catalog import CATALOG
from tests.timing import in_time

pytestmark = pytest.mark.cluster

SCORE = "from gpumem_nb.workloads.evaluate import score\nscore({name!r}, model)"
STEPS = 100


# digits-resnet learns on four ranks in the demo, which fails if it does not; tests/notebook runs it.
@pytest.mark.full
@pytest.mark.parametrize("name", ["digits-separable", "text-gpt"])
def test_a_workload_learns_in_two_minutes(four_ranks: Session, fresh: Callable[..., Session], name: str) -> None:
    options = {option: int(entry.default) for option, entry in CATALOG[name].options.items() if option != "dropout"}
    session = fresh(four_ranks, name, **options)
    began = time.monotonic()
    while not has_learned(session, name):
        assert session.history.steps < STEPS
        session.train(10)
    assert in_time(time.monotonic() - began, 120.0)


def has_learned(session: Session, name: str) -> bool:
    (found,) = session.run(SCORE.format(name=name), ranks=[0])
    if name == "text-gpt":
        return bool(found["nats_per_character"] < 0.85 * found["unigram_nats"])
    return bool(found["accuracy"] > 0.95)
