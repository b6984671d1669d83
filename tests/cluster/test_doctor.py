"""The doctor finds what is planted, first, with its fix, says nothing of the healthy, and disturbs no other work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.planning.doctor.finding import TIME, Diagnosis, Finding
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError, Interrupted, WorkloadError
from gpumem_nb.workloads.catalog import CATALOG
from tests.cluster.doctor_plants import LET_GO, MIB, PLANTS, TRANSFORMERS, Plant, healthy, planted, set_limit
from tests.cluster.stop_button import PROMPT_S, Stop, asked
from tests.conftest import weights
from tests.internals import wait_for_steps
from tests.tiers import every, first_tier
from tests.timing import in_time, patience

pytestmark = pytest.mark.cluster


@pytest.fixture
def patient(two_ranks: Session) -> Iterator[Session]:
    """Two ranks whose limits and devices are put back."""
    yield two_ranks
    two_ranks.pause()
    two_ranks.run(f"{LET_GO}; torch.set_num_threads({two_ranks.ranks[0].threads})")
    set_limit(two_ranks, 96 * MIB)


def own(found: Diagnosis) -> list[Finding]:
    """What is wrong with the session: a machine on which tests run beside others may have no core for it, too."""
    return [one for one in found.findings if one.cause != "no core"]


def found_first(patient: Session, plant: Plant) -> Finding:
    """Plant something; the finding that it is."""
    planted(patient, plant)
    found = patient.doctor()
    first = own(found)[0]
    assert first.cause == plant.cause, found
    assert plant.words in f"{first.sentence} {first.do}"
    assert first.evidence
    if plant.flip is not None:
        assert first.flip
        assert first.flip.changes == plant.flip
    return first


MORE_IS_ASKED = ("a fat fusion buffer", "a leak")
"""Plants with a test of their own, which goes on from what was found."""


@pytest.mark.parametrize("name", first_tier((name for name in PLANTS if name not in MORE_IS_ASKED), every(7)))
def test_what_is_planted_is_found_first(patient: Session, name: str) -> None:
    found_first(patient, PLANTS[name])


@pytest.mark.parametrize("name", first_tier([*CATALOG, *TRANSFORMERS], lambda index, _: index == 0))
def test_nothing_is_found_in_a_healthy_session(patient: Session, name: str) -> None:
    healthy(patient, name)
    found = patient.doctor()
    wrong = [one for one in own(found) if one.level != TIME or patience() == 1]  # other programs may slow a rank down
    assert wrong == [], found


def test_a_flip_that_mends_is_predicted_and_measured_when_it_is_taken(patient: Session) -> None:
    first = found_first(patient, PLANTS["a fat fusion buffer"])
    flip = first.flip
    assert flip
    assert flip.saves_bytes == pytest.approx(44 * MIB, rel=0.01)
    assert "keeps the mathematics to rounding" in first.helps
    patient.set(**flip.changes)
    patient.train(4)
    after = patient.doctor()
    assert "communication buffers dominate" not in [one.cause for one in after.findings]
    scored = patient.score().scored[-1]
    assert scored.error == pytest.approx(0, abs=0.02)
    assert f"predicted a live peak of {_mib(scored.predicted.live_peak_bytes)}" in after.came
    assert f"measured {_mib(scored.came.peak_bytes)}" in after.came


def _mib(size: int | None) -> str:
    assert size
    return f"{size / MIB:.1f} MiB"


def test_without_a_step_it_says_what_to_do(patient: Session, fresh: Callable[..., Session]) -> None:
    fresh(patient)
    with pytest.raises(WorkloadError, match=r"Nothing was trained yet.*%hvd_train 20"):
        patient.doctor()


@pytest.mark.full
def test_training_goes_on_meanwhile_as_if_nothing_had_been(patient: Session, fresh: Callable[..., Session]) -> None:
    fresh(patient).train(3)
    undisturbed = [patient.train(4).frame().loss.tolist() for _ in range(2)]
    fresh(patient).train(3)
    first = patient.train(4).frame().loss.tolist()
    patient.doctor()
    assert [first, patient.train(4).frame().loss.tolist()] == undisturbed
    patient.play()
    wait_for_steps(patient, patient.history.steps + 2)
    patient.doctor()
    assert patient.playing
    wait_for_steps(patient, patient.history.steps + 2)
    patient.pause()
    assert len(weights(patient)) == 1


def test_an_interrupt_ends_it_and_leaves_nothing_behind(patient: Session, fresh: Callable[..., Session]) -> None:
    fresh(patient).train(3)
    patient.run("import time\nheld = model.register_forward_pre_hook(lambda *_: time.sleep(0.2))")
    before = weights(patient)
    stop = Stop(asked(patient))
    with pytest.raises(Interrupted):
        patient.doctor()
    assert in_time(stop.took_s(), PROMPT_S)
    patient.run("held.remove()")
    assert weights(patient) == before
    patient.train(2)


def test_a_flip_meanwhile_is_told(patient: Session, fresh: Callable[..., Session]) -> None:
    fresh(patient).train(3)
    done = threading.Event()

    def flip(what: str, _: float) -> None:
        if not done.is_set():
            done.set()
            patient.set(batch_size=16)

    with pytest.raises(WorkloadError, match="changed while the session was examined"):
        patient.doctor(flip)


@pytest.mark.full
def test_a_leak_is_found_and_the_checklist_says_what_to_do(patient: Session, shell: InteractiveShell) -> None:
    found_first(patient, PLANTS["a leak"])
    found: Any = shell.run_line_magic("hvd_doctor", "--checklist")
    states = {check.question: check.ok for check in found.checks}
    assert list(states.values()) == [True, True, True, True, False, None], found
    assert "kept" in str(found)
    assert "%hvd_load digits-resnet" in str(found)
    assert "torch 2." in str(found)


@pytest.mark.full
def test_the_checklist_is_gone_through_where_steps_fail(patient: Session) -> None:
    planted(patient, PLANTS["a step that raises"])
    found = patient.checklist()
    assert [check.ok for check in found.checks] == [True, True, None, None, None, None], found
    assert "planted" in str(found)


@pytest.mark.full
def test_the_magic_gives_text_where_there_is_no_notebook(
    patient: Session, shell: InteractiveShell, fresh: Callable[..., Session]
) -> None:
    fresh(patient).train(2)
    found: Any = shell.run_line_magic("hvd_doctor", "")
    assert isinstance(found, Diagnosis)
    assert "Time is judged from 14 steps on" in str(found)
    with pytest.raises(GpumemError):
        patient.load("no-such-workload")
