"""What the course says of an answer, its hints, and where a student stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .tables import Report, Table

_COLOURS = {("", "right"): "var(--jp-success-color1, #388e3c)", ("", "not yet"): "var(--jp-warn-color1, #f57c00)"}


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(Report):
    """The result of one check.

    Attributes:
        exercise: its number.
        title: its title.
        state: ``right``, ``not yet`` or ``open`` where nothing was judged.
        answer: as it was read, in words.
        compared: what was measured: beside the guess, by the headings of columns, or in a sentence.
        said: why it is right, the hint, or what to do first.
        note: what is wrong with the progress's file; empty where nothing is.
    """

    exercise: str
    title: str
    state: str
    answer: str
    compared: Mapping[str, str] | str
    said: str
    note: str = ""

    @property
    def right(self) -> bool:
        """Return whether the answer is right."""
        return self.state == "right"

    @property
    def shown(self) -> list[Table | str]:
        """The verdict beside the figures, and why."""
        columns, sentence = ({}, self.compared) if isinstance(self.compared, str) else (self.compared, "")
        headings = ("", "exercise", *columns)
        row = (self.state, f"{self.exercise} {self.title}", *columns.values())
        table = Table("", headings, (row,), frozenset(headings), _COLOURS)
        return [table, *filter(None, [sentence, self.said, self.note])]

    @property
    def records(self) -> list[dict[str, Any]]:
        """One row."""
        about = {"exercise": self.exercise, "title": self.title, "state": self.state, "answer": self.answer}
        compared = {"compared": self.compared} if isinstance(self.compared, str) else dict(self.compared)
        return [about | compared | {"said": self.said}]


@dataclass(frozen=True, slots=True, repr=False)
class HintReport(Report):
    """The hints of an exercise that were told so far, of so many."""

    exercise: str
    asks: str
    told: tuple[str, ...]
    there_are: int
    note: str = ""

    @property
    def shown(self) -> list[str]:
        """The question, and each hint with its number."""
        hints = [f"Hint {place} of {self.there_are}: {hint}" for place, hint in enumerate(self.told, 1)]
        return list(filter(None, [f"{self.exercise} {self.asks}", *hints, self.note]))

    @property
    def records(self) -> list[dict[str, Any]]:
        """A row for each hint."""
        return [{"exercise": self.exercise, "number": place, "hint": hint} for place, hint in enumerate(self.told, 1)]


@dataclass(frozen=True, slots=True)
class ExerciseState:
    """Where a student stands with one exercise."""

    exercise: str
    title: str
    asks: str
    state: str
    tries: int
    hints: int
    first: str
    answer: str


@dataclass(frozen=True, slots=True, repr=False)
class LessonReport(Report):
    """A lesson's exercises and where a student stands."""

    lesson: str
    title: str
    exercises: tuple[ExerciseState, ...]
    notes: tuple[str, ...] = ()

    @property
    def shown(self) -> list[Table | str]:
        """A row for each exercise, and what comes next."""
        headings = ("", "exercise", "what it asks", "tries", "hints")
        rows = tuple(
            (one.state, f"{one.exercise} {one.title}", one.asks, str(one.tries), str(one.hints))
            for one in self.exercises
        )
        table = Table(f"Lesson {self.lesson}: {self.title}", headings, rows, frozenset(headings[:3]), _COLOURS)
        return [table, self._next, *self.notes]

    @property
    def _next(self) -> str:
        solved = sum(one.state == "right" for one in self.exercises)
        coming = next((one for one in self.exercises if one.state != "right"), None)
        if coming is None:
            return f"All {solved} exercises are right."
        return (
            f"{solved} of {len(self.exercises)} right. Next: {coming.exercise} (a hint: %lesson hint {coming.exercise})"
        )

    @property
    def records(self) -> list[Mapping[str, Any]]:
        """A row for each exercise."""
        return [{"lesson": self.lesson, **dataclasses.asdict(one)} for one in self.exercises]
