"""The doctor finds what is planted, first, with what mends it; says nothing of healthy sessions; and disturbs nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpumem_nb.planning.doctor.diagnosis import Diagnosis
from gpumem_nb.planning.doctor.finding import Finding
from gpumem_nb.session import Session
from tests.cluster.doctor_plants import LET_GO, PLANTS, Plant, planted, set_limit

pytestmark = pytest.mark.cluster
MIB = 2**20


@pytest.fixture
def patient(two_ranks: Session) -> Iterator[Session]:
    """Two ranks whose limits and devices are put back."""
    yield two_ranks
    two_ranks.run(LET_GO)
    set_limit(two_ranks, 96 * MIB)


def own(found: Diagnosis) -> list[Finding]:
    """What is wrong with the session: a machine on which tests run beside others may have no core for it, too."""
    return [one for one in found.findings if one.cause != "no core"]


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_what_is_planted_is_found_first(patient: Session, plant: Plant) -> None:
    planted(patient, plant)
    found = patient.doctor()
    first = own(found)[0]
    assert first.cause == plant.cause, found
    assert plant.words in f"{first.sentence} {first.do}"
    assert first.evidence
    if plant.flip is not None:
        assert first.flip
        assert first.flip.changes == plant.flip
