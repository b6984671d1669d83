"""Every fault in every situation: a clear message in time, identical weights, memory as before, no process left."""

from __future__ import annotations

import random

import pytest

from gpumem_nb.session import Session
from tests.cluster import faults, trouble
from tests.cluster.faults import FAULTS, Fault
from tests.cluster.test_snapshots import snapshots
from tests.tiers import first_tier
from tests.timing import in_time

pytestmark = pytest.mark.cluster
SITUATIONS = ("foreground", "background", "flip", "cell")


ALL = [(fault, SITUATIONS[(turn + index) % 4]) for turn in range(4) for index, fault in enumerate(FAULTS)]


# The first tier has each fault once: the first turn.
@pytest.mark.parametrize(
    ("fault", "situation"),
    first_tier(ALL, lambda index, _: index < len(FAULTS)),
    ids=lambda value: value.name.replace(" ", "-") if isinstance(value, Fault) else value,
)
def test_fault(two_ranks: Session, fault: Fault, situation: str) -> None:
    session = trouble.prepared(two_ranks)
    session.set(stall_limit_s=30, snapshot_steps=2)
    session.train(3)
    snapshots(session)  # waits until one is written: the ranks may die at once
    if fault.stalls:
        session.set(stall_limit_s=faults.STALL_LIMIT_S)
    incident, _ = faults.endure(session, fault, situation)
    assert in_time(incident.took_s, fault.within_s)
    if situation == "flip" and fault.ends != "survived":
        assert not incident.steps_flipped, "it struck in the first step under the new settings"


CHEAP = [
    *(fault for fault in FAULTS if fault.name in ("OOM", "exception", "wrong shapes", "NaN loss", "interrupt")),
    Fault("OOM in backward", "rank 1 ran out of memory in the backward part", faults.OOM_S, ("backward", "oom")),
    Fault("exception in collate", "rank 1 failed in the data part .* planted", 3.0, ("collate", "error")),
]


# Hundreds of them: make soak.
@pytest.mark.full
def test_faults_at_random_moments(two_ranks: Session) -> None:
    dice = random.Random(0)
    session = trouble.prepared(two_ranks)
    for _ in range(25):
        session.set(
            checkpointing=dice.choice(["none", "selective", "blocks", "sqrt"]),
            accumulation_steps=dice.choice([1, 2]),
            optimizer=dice.choice(["adamw", "momentum", "own"]),
        )
        session.train(1)
        fault = dice.choice(CHEAP).at_a_random_moment(dice)
        incident, _ = faults.endure(session, fault, "foreground")
        assert in_time(incident.took_s, fault.within_s), fault
