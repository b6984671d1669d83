"""Every fault in every situation: a clear message in time, identical weights, memory as before, no process left."""

from __future__ import annotations

import random
import re

import pytest

from gpumem_nb.session import Session
from tests.cluster import faults, trouble
from tests.cluster.faults import FAULTS, Fault, Scene
from tests.conftest import ranks, weights

pytestmark = pytest.mark.cluster
SITUATIONS = ("foreground", "background", "flip", "cell")


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_fault(fault: Fault, situation: str) -> None:
    session = trouble.prepared(ranks(2))
    session.set(stall_limit_s=faults.STALL_LIMIT_S, snapshot_steps=2)
    session.train(3)
    before, processes = trouble.everything(session), faults.family(session)
    scene = Scene(session, fault)
    getattr(scene, situation)()
    assert scene.heard_s, scene.said
    assert scene.heard_s - scene.struck_s < fault.within_s
    faults.leaves_all_well(session, fault, before, processes)


@pytest.mark.parametrize("seed", [0])
def test_a_hundred_faults_at_random_moments(seed: int) -> None:
    dice = random.Random(seed)
    session = trouble.prepared(ranks(2))
    session.train(2)
    for _ in range(100):
        hurt_somewhere(session, dice)
    assert session.train(2).steps == 2


def hurt_somewhere(session: Session, dice: random.Random) -> None:
    """One cheap fault after a random number of batches, under random settings that do not end by themselves."""
    where, kind = dice.choice(
        [("forward", "oom"), ("backward", "oom"), ("collate", "error"), ("shapes", "shapes"), ("nan", "nan")]
    )
    session.set(
        checkpointing=dice.choice(["none", "blocks", "sqrt"]),
        accumulation_steps=dice.choice([1, 2]),
        optimizer=dice.choice(["adamw", "momentum", "own"]),
    )
    session.train(1)
    session.run(f"plant({where!r}, {kind!r}, {dice.randrange(6)})")
    try:
        session.train(8)
    except Exception as error:
        assert re.search("rank 1 (ran out of memory|failed)", str(error)), error  # noqa: PT017
    else:
        pytest.fail("the fault was not noticed")
    assert len(weights(session)) == 1
