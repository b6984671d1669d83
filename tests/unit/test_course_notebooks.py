"""The course's notebooks as they are shipped: cells and answers for every exercise, and no number unmeasured."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from gpumem_nb.course.lessons import LESSONS
from tests.course import mutants
from tests.course.metadata import completed
from tests.course.notebooks import ANSWER, CHECK, COURSE, NOTEBOOKS, answers_of, figures_in, number_of, prose, read


def test_every_lesson_has_its_notebook() -> None:
    assert [number_of(path) for path in NOTEBOOKS] == sorted(LESSONS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=number_of)
def test_a_notebook_is_shipped_without_outputs_and_with_nbgraders_metadata(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook == completed(notebook), f"python -m tests.course.metadata {path.relative_to(COURSE.parents[1])}"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=number_of)
def test_every_exercise_has_a_cell_for_its_answer_and_behind_it_one_that_checks(path: Path) -> None:
    exercises = [one.number.replace(".", "-") for one in LESSONS[number_of(path)].exercises]
    cells = read(path).cells
    found = [cell.id for cell in cells if cell.id.startswith((ANSWER, CHECK))]
    assert found == [kind + number for number in exercises for kind in (ANSWER, CHECK)]
    for cell in cells:
        if cell.id.startswith(CHECK):
            assert f'"{cell.id.removeprefix(CHECK).replace("-", ".")}"' in cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=number_of)
def test_the_key_has_five_ways_to_each_answer_and_hints_for_wrong_ones(path: Path) -> None:
    key = answers_of(path).exercises
    assert list(key) == [one.number for one in LESSONS[number_of(path)].exercises]
    for number, of_exercise in key.items():
        assert len(set(of_exercise.right)) >= 5, number
        assert len(of_exercise.wrong) >= 3, number
        assert all(wrong.hint.strip() for wrong in of_exercise.wrong), number
        assert any(True for right in of_exercise.right for _ in mutants.of(right)), number


@pytest.mark.parametrize("path", NOTEBOOKS, ids=number_of)
def test_every_number_of_the_prose_is_measured_again_or_given(path: Path) -> None:
    answers, notebook = answers_of(path), read(path)
    told = {figure for text in prose(notebook) for figure in figures_in(text)}
    known = {figure.text for figure in answers.figures} | set(answers.given)
    assert told - known == set()
    text = "\n".join(prose(notebook))
    assert [one for one in known if one not in text] == []
    assert {figure.after for figure in answers.figures} <= {cell.id for cell in notebook.cells}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=number_of)
def test_a_lesson_has_a_picture_that_lies_beside_it(path: Path) -> None:
    pictures = list((COURSE / "pictures").glob(f"{number_of(path)}_*.svg"))
    assert pictures
    assert all(f"(pictures/{picture.name})" in "\n".join(prose(read(path))) for picture in pictures)


def test_mutants_differ_in_one_place() -> None:
    assert list(mutants.of('["a", "b"]')) == ['["b"]', '["a"]']
    assert set(mutants.of("x = 16 * n")) >= {"x = 32 * n", "x = 8 * n", "x = 128 * n", "x = 16 / n"}
    assert set(mutants.of('peak = "123 MiB"')) >= {'peak = "123 GiB"', 'peak = "246 MiB"'}
    assert "%hvd_set batch_size=26" in set(mutants.of("%hvd_set batch_size=13"))
    cell = "%%hvd\nx = 1\ndef f():\n    a\n    b\n"
    assert list(mutants.of(cell)) == ["%%hvd\nx = 1\ndef f():\n    b", "%%hvd\nx = 1\ndef f():\n    a\n"]
