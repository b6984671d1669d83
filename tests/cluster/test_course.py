"""The course's checks on two ranks: they measure, and leave the session as it was."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.course.answers import Variable
from gpumem_nb.course.evidence import Evidence
from gpumem_nb.course.exercise import Content, Exercise, Outcome, right, wrong
from gpumem_nb.course.lesson import Lesson
from gpumem_nb.course.lessons import LESSONS, lesson_1
from gpumem_nb.session import Session
from tests.course.notebooks import COURSE, answers_of, read
from tests.tiers import first_tier

pytestmark = pytest.mark.cluster

SMALL = "text-gpt width=64 depth=2"


@pytest.fixture
def lesson(two_ranks: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lesson:
    """Lesson 1, about a model that fits ranks of tests."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(lesson_1, "LOAD", SMALL)
    return Lesson(LESSONS["1"])


def test_guesses_are_held_against_what_ranks_measure_and_settings_stay(two_ranks: Session, lesson: Lesson) -> None:
    two_ranks.load("digits-resnet", width=8, depth=1, resolution=8)
    assert f"Type %hvd_load {SMALL}" in str(lesson.check("1.1", 16))
    two_ranks.load("text-gpt", width=64, depth=2)
    before = two_ranks.set(batch_size=3, precision="bf16")
    two_ranks.play()
    assert lesson.check("1.1", 16).right
    assert two_ranks.playing
    two_ranks.pause()
    steps = two_ranks.history.steps
    said = lesson.check("1.1", 8)
    assert isinstance(said.compared, dict)
    assert (said.compared["you"], said.compared["measured"]) == ("8 bytes", "16 bytes")
    assert "That is two numbers" in said.said
    assert two_ranks.history.steps == steps  # a second try is held against the same figure
    assert lesson.check("1.2", "activations and inputs").right
    assert two_ranks.settings == before
    assert [one.state for one in lesson.status().exercises][:3] == ["right", "right", "open"]


@pytest.mark.full
def test_settings_that_do_not_fit_are_told_and_put_back(two_ranks: Session, lesson: Lesson) -> None:
    two_ranks.load("text-gpt", width=64, depth=2)
    before = two_ranks.set(batch_size=3000)
    said = lesson.check("1.4")
    assert not said.right
    assert "That is too many" in said.said
    assert "ran out of memory" in said.said
    assert two_ranks.settings == before


def test_an_answer_can_be_code_on_the_ranks(two_ranks: Session, lesson: Lesson) -> None:
    def judge(name: str, evidence: Evidence) -> Outcome:
        sums = evidence.session.run(f"{name}([1, 2])")
        return right("yes") if sums == [3, 3] else wrong("not the sum")

    about = Exercise("9.1", "Sum", "Add.", Variable("a function", "add"), judge, ("sum",))
    asks = Lesson(Content("9", "Nine", (about,)))
    two_ranks.run("def mine(numbers):\n    return sum(numbers)\nwrong = max")
    assert asks.check("9.1", "mine").right
    assert asks.check("9.1", "wrong").said == "not the sum"
    assert "NameError: name 'nothing' is not defined" in asks.check("9.1", "nothing").said


# Exercises that need nothing loaded, and the cells that they build on.
ON_RANKS = {
    "2": (["loop"], ["2.1", "2.2", "2.3", "2.4", "2.5"]),
    "3": (["imports"], ["3.2", "3.3", "3.5"]),
}
FIRST: dict[str, tuple[Any, ...]] = {"2": ("2.1", 1), "3": ("3.2",)}


@pytest.mark.parametrize("number", first_tier(ON_RANKS, lambda _, number: number == "3"))
def test_students_code_is_judged_on_two_ranks_as_on_four(
    two_ranks: Session, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (path,) = COURSE.glob(f"{number}_*.ipynb")
    lesson, limit_s, known = Lesson(LESSONS[number]), two_ranks.policy.stall_limit_s, two_ranks.run("set(globals())")
    assert "The ranks do not know" in lesson.check(*FIRST[number]).said
    cells = {cell.id: cell.source for cell in read(path).cells}
    before, exercises = ON_RANKS[number]
    for cell in before:
        two_ranks.run(cells[cell].removeprefix("%%hvd\n"))
    for exercise in exercises:
        key = answers_of(path).exercises[exercise]
        for answer, hint in [*((one.answer, one.hint) for one in key.wrong[:1]), (key.right[0], "")]:
            given = None
            if answer.startswith("%%hvd"):
                two_ranks.run(answer.removeprefix("%%hvd\n"))
            else:
                given = ast.literal_eval(answer.partition(" = ")[2])
            said = lesson.check(exercise, given)
            assert said.right == (not hint)
            assert hint in f"{said.said} {said.compared}"
    assert two_ranks.policy.stall_limit_s == limit_s
    two_ranks.run(f"for _name in set(globals()) - {known[0]!r} - {{'_name'}}:\n    del globals()[_name]")


def test_a_knob_that_switches_another_does_not_keep_settings_from_being_measured(two_ranks: Session) -> None:
    two_ranks.load("text-gpt", width=64, depth=2)
    two_ranks.set(activation_budget=0.3)
    before = two_ranks.set(checkpointing="blocks", batch_size=3)
    with Evidence().trained(checkpointing="blocks", batch_size=2):
        assert (two_ranks.settings.checkpointing, two_ranks.settings.activation_budget) == ("blocks", 0.5)
    assert two_ranks.settings == before
