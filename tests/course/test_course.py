"""Each lesson on real ranks: right answers are taken, wrong ones get the hint that is meant, and its numbers are so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpumem_nb.course.lesson import GRADING
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.units import parse_size
from tests.course import mutants
from tests.course.notebooks import CHECK, NOTEBOOKS, Key, answers_of, number_of, read
from tests.course.student import Student, student
from tests.timing import slowness

pytestmark = [pytest.mark.notebook, pytest.mark.full, pytest.mark.timeout(1500)]

MACHINE_S = 180.0  # of two cores, for all cells of a lesson
MUTANTS = 30  # of a lesson's right answers
REFUSED = 0.95


@pytest.fixture(params=NOTEBOOKS, ids=number_of)
def lesson(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The notebook of a lesson, taken by a student who has done nothing of it yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv(GRADING, raising=False)
    path: Path = request.param
    return path


def test_it_runs_with_the_answer_key_in_time_and_its_numbers_are_so(lesson: Path, tmp_path: Path) -> None:
    key, slow, wrong = answers_of(lesson), slowness(), []
    with student(read(lesson), tmp_path) as one:
        for cell, exercise in one.exercises():
            is_check = cell.id.startswith(CHECK)
            said = one.does(key.exercises[exercise].right[0] if exercise and not is_check else cell.source)
            if is_check:
                assert one.state == "right", said
            took_s = one.seconds
            for figure in (figure for figure in key.figures if figure.after == cell.id):
                found, told = one.finds(figure.measured), value_of(figure.text)
                if abs(found - told) > figure.within * abs(told):
                    wrong.append(f"{figure.text} after {cell.id}: measured {found:,.4g}")
            one.seconds = took_s  # a student does not measure them again
        print(f"{lesson.name}: {one.seconds:.0f} s of cells")
        assert not wrong
        assert one.seconds < MACHINE_S * slow


def test_every_right_answer_is_taken_and_every_wrong_one_gets_its_hint(lesson: Path, tmp_path: Path) -> None:
    key, taken, tried = answers_of(lesson), list[str](), 0
    each = -(-MUTANTS // len(key.exercises))
    with student(read(lesson), tmp_path) as one:
        for cell, exercise in one.exercises():
            if not cell.id.startswith(CHECK):
                one.does(cell.source)  # a student's cell as it is shipped: what follows may show what it does
            else:
                of_exercise = key.exercises[exercise]
                check_key(one, exercise, of_exercise)
                for mutant in sample(of_exercise, each):
                    state, said = one.answers(exercise, mutant)
                    tried += 1
                    taken += [f"{exercise}: {mutant!r}\n{said}"] if state == "right" else []
                    assert "Traceback" not in said
                    assert state == "right" or len(said.splitlines()) > 1 or state == "refused", said
                state, said = one.answers(exercise, of_exercise.right[0])
                assert state == "right", said  # and the notebook goes on from here
    print(f"{lesson.name}: {len(taken)} of {tried} mutants taken")
    assert len(taken) <= (1 - REFUSED) * tried, "\n".join(taken)


def check_key(one: Student, exercise: str, key: Key) -> None:
    """Hold an exercise to its key: wrong answers first, as a student comes to it."""
    for wrong in key.wrong:
        state, said = one.answers(exercise, wrong.answer)
        assert state != "right", (exercise, wrong.answer, said)
        assert wrong.hint in said, (exercise, wrong.answer, said)
    for right in key.right:
        state, said = one.answers(exercise, right)
        assert state == "right", (exercise, right, said)


def sample(key: Key, most: int) -> list[str]:
    """Some mutants of the right answers, of all of them in turn."""
    made = [list(mutants.of(right)) for right in key.right]
    turns = [of[place] for place in range(max(map(len, made), default=0)) for of in made if place < len(of)]
    return [one for one in dict.fromkeys(turns) if one not in (*key.right, *key.still_right)][:most]


def value_of(text: str) -> float:
    """The number that stands in a text, in bytes where it is a size."""
    try:
        return parse_size(text)
    except InvalidInput:
        return float(re.match(r"[\d.,]+", text)[0].replace(",", ""))  # type: ignore[index]
