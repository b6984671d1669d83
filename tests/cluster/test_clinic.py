"""The clinic on two ranks: what the notebook plants is refused with a hint, and a repair is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_nb.course.exercise import OPEN, RIGHT, WRONG
from gpumem_nb.course.lesson import Lesson
from gpumem_nb.course.lessons import LESSONS, clinic
from gpumem_nb.session import Session
from tests.cluster.doctor_plants import MIB, ROOM, set_limit
from tests.course.notebooks import ANSWER, COURSE, answers_of, read
from tests.tiers import every, first_tier

pytestmark = pytest.mark.cluster

NOTEBOOK = COURSE / "clinic.ipynb"
BROKEN = {cell.id.removeprefix(ANSWER): cell.source for cell in read(NOTEBOOK).cells if cell.id.startswith(ANSWER)}
ANSWERS = answers_of(NOTEBOOK).exercises


@pytest.fixture
def ward(two_ranks: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Session, Lesson]]:
    """Two ranks with as much room as the notebook's, and the clinic without any answers."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    set_limit(two_ranks, ROOM)
    yield two_ranks, Lesson(LESSONS["clinic"])
    set_limit(two_ranks, 96 * MIB)


def runs(session: Session, cell: str) -> None:
    """Run a cell of a notebook as its magic does."""
    session.run(cell.strip().removeprefix("%%hvd"))


@pytest.mark.parametrize("number", first_tier([one.number for one in clinic.CASES], every(4)))
def test_what_is_broken_is_refused_and_a_repair_is_taken(ward: tuple[Session, Lesson], number: str) -> None:
    session, lesson = ward
    before = session.run("torch.get_rng_state().sum().item()")
    runs(session, BROKEN[number.replace(".", "-")])
    refused = lesson.check(number)
    assert refused.state == WRONG, refused
    assert not refused.said.startswith("Your code failed"), refused
    runs(session, ANSWERS[number].right[0])
    assert lesson.check(number).state == RIGHT, lesson.check(number)
    assert session.run("torch.get_rng_state().sum().item()") == before


def test_a_case_whose_cell_was_not_run_says_so(ward: tuple[Session, Lesson]) -> None:
    session, lesson = ward
    session.run("globals().pop('pad', None)")
    found = lesson.check("clinic.10")
    assert found.state == OPEN
    assert "Run the cell that defines pad first" in found.said


@pytest.mark.full
def test_ranks_that_wait_for_each_other_are_told(ward: tuple[Session, Lesson]) -> None:
    session, lesson = ward
    session.run("def before_evaluation(model):\n    if rank == 0:\n        hvd.broadcast(torch.ones(1), root_rank=0)")
    found = lesson.check("clinic.12")
    assert found.state == WRONG
    assert "all ranks must" in found.said
    runs(session, ANSWERS["clinic.12"].right[0])
    assert lesson.check("clinic.12").right
