"""The course's notebooks and answer keys as they lie in the checkout."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

COURSE = Path(__file__).parents[2] / "notebooks" / "course"
NOTEBOOKS = sorted(COURSE.glob("*.ipynb"))
ANSWER, CHECK = "answer-", "check-"
# What was measured has a unit behind it.
_FIGURE = re.compile(r"\d[\d,.]*\s?(?:[KMG]i?B|bytes|ms|s|seconds|minutes|%|samples/s|times)(?![\w/])")


@dataclass(frozen=True)
class Wrong:
    """A wrong answer, and words of the hint that it must get."""

    answer: str
    hint: str


@dataclass(frozen=True)
class Key:
    """An exercise's answers, each the source of the student's cell; ``still_right`` are mutants that are right, too."""

    right: tuple[str, ...]
    wrong: tuple[Wrong, ...]
    still_right: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A number of the prose, and how it is measured again once the cell ``after`` was run."""

    text: str
    after: str
    measured: str
    within: float


@dataclass(frozen=True)
class Answers:
    """What ``answers/lesson_N.toml`` holds; ``given`` are numbers of the prose that were not measured."""

    exercises: Mapping[str, Key]
    figures: tuple[Figure, ...]
    given: tuple[str, ...]


def number_of(path: Path) -> str:
    """Return the lesson's number, with which its notebook's name begins."""
    return path.stem.partition("_")[0]


def read(path: Path) -> Any:
    """Return a notebook."""
    return nbformat.read(path, as_version=4)


def answers_of(path: Path) -> Answers:
    """Return the answers to a notebook's exercises."""
    file = COURSE / "answers" / f"lesson_{number_of(path)}.toml"
    with file.open("rb") as stream:
        found = tomllib.load(stream)
    exercises = {
        number: Key(tuple(key["right"]), tuple(Wrong(**one) for one in key["wrong"]), tuple(key.get("still_right", ())))
        for number, key in found["exercises"].items()
    }
    figures = tuple(Figure(**one) for one in found.get("figures", ()))
    return Answers(exercises, figures, tuple(found.get("given", ())))


def answered(path: Path) -> Any:
    """Return a notebook with the key's first answers in the student's cells."""
    notebook, key = read(path), answers_of(path).exercises
    for cell in notebook.cells:
        if cell.id.startswith(ANSWER):
            cell.source = key[exercise_of(cell)].right[0]
    return notebook


def exercise_of(cell: Any) -> str:
    """Return the exercise whose answer or check a cell is, such as ``1.2``; empty for any other."""
    for kind in (ANSWER, CHECK):
        if cell.id.startswith(kind):
            return str(cell.id.removeprefix(kind).replace("-", "."))
    return ""


def nbgrader(cell: Any) -> dict[str, Any]:
    """Return nbgrader's metadata of an exercise's cell, in the form of its schema 3."""
    answers = cell.id.startswith(ANSWER)
    about = {"grade": not answers, "grade_id": cell.id, "locked": not answers, "schema_version": 3}
    return about | {"solution": answers, "task": False} | ({} if answers else {"points": 1})


def prose(notebook: Any) -> Iterator[str]:
    """Yield the text of its cells."""
    return (cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def figures_in(text: str) -> list[str]:
    """Return the numbers with a unit in it."""
    return [re.sub(r"\s", " ", found) for found in _FIGURE.findall(text)]
