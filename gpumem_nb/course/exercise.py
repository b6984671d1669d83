"""An exercise as a value: what it asks, the form of its answer, its hints, and who judges it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .answers import Answer
from .evidence import Evidence

RIGHT, WRONG, OPEN = "right", "not yet", "open"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a check.

    Attributes:
        state: ``right``, ``not yet``, or ``open`` where there was nothing to judge; that counts as no try.
        said: why it is right, the hint, or what to do first.
        compared: what was measured: beside the guess, by the headings of columns, or in a sentence.
    """

    state: str
    said: str
    compared: Mapping[str, str] | str = ""


def right(why: str, compared: Mapping[str, str] | str = "") -> Outcome:
    """Accept an answer; ``why`` is what to take away from it."""
    return Outcome(RIGHT, why, compared)


def wrong(hint: str, compared: Mapping[str, str] | str = "") -> Outcome:
    """Refuse an answer; ``hint`` names the misconception and not the figure."""
    return Outcome(WRONG, hint, compared)


def not_ready(first: str) -> Outcome:
    """Say what to do before this can be checked."""
    return Outcome(OPEN, first)


Judge = Callable[[Any, Evidence], Outcome]


@dataclass(frozen=True, slots=True)
class Exercise:
    """One exercise.

    Attributes:
        number: of lesson and exercise, such as ``1.2``.
        title: a few words.
        asks: the question, in one or two sentences.
        answer: the form in which it is answered.
        judge: takes the answer as ``answer`` read it, and the evidence.
        hints: from a nudge to nearly the answer.
    """

    number: str
    title: str
    asks: str
    answer: Answer
    judge: Judge
    hints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Content:
    """One lesson: its number, its title and its exercises in order."""

    number: str
    title: str
    exercises: tuple[Exercise, ...]
