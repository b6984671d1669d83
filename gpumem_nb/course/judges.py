"""The two forms that most judges have: a guess beside what is measured, and words beside those that are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..shared.units import format_bytes
from .answers import in_words
from .evidence import Evidence
from .exercise import Judge, Outcome, right, wrong

_SAME = 0.005
CLOSE = 0.05
"""How near a guess must be to a misconception's figure to be told of it, where the tolerance is not larger."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A misconception: the figure that one comes to by it, and the hint that names it.

    Attributes:
        figure: of what was measured, as that of the right answer is.
        hint: a sentence.
    """

    figure: Callable[[Any], float]
    hint: str


def measured(
    measure: Callable[[Evidence], Any],
    figure: Callable[[Any], float],
    *,
    within: float,
    why: str | Callable[[Any], str],
    mistakes: Sequence[Mistake] = (),
    too_low: str,
    too_high: str,
    words: Callable[[float], str] = lambda value: format_bytes(round(value)),
) -> Judge:
    """Return a judge that measures, shows the guess beside the figure, and accepts it within a tolerance.

    Args:
        measure: asks the session, and is called once for each check.
        figure: the right answer, of what ``measure`` gave.
        within: the tolerance as a share of the figure, such as 0.1.
        why: what to take away, as a sentence or made of what was measured.
        mistakes: whose figures are told apart from each other where they can be; the nearest is told.
        too_low, too_high: the hint for any other guess.
        words: a figure for people; sizes by default.
    """

    def judge(guess: float, evidence: Evidence) -> Outcome:
        found = measure(evidence)
        true = figure(found)
        off = _off(guess, true)
        compared = {
            "you": words(guess),
            "measured": words(true),
            "you are": _distance(off, within),
            "right is": _within(within),
        }
        if abs(off) <= within:
            return right(why if isinstance(why, str) else why(found), compared)
        by_distance = sorted((abs(_off(guess, one.figure(found))), place) for place, one in enumerate(mistakes))
        if by_distance and by_distance[0][0] <= max(CLOSE, within):
            return wrong(mistakes[by_distance[0][1]].hint, compared)
        return wrong(too_high if off > 0 else too_low, compared)

    return judge


def named(
    find: Callable[[Evidence], frozenset[str]], *, why: str, mistakes: Sequence[tuple[str, str]], otherwise: str
) -> Judge:
    """Return a judge of words: one (:class:`~.answers.Word`) of several right ones, or exactly these ones (``Words``).

    Args:
        find: the right words.
        why: what to take away.
        mistakes: a word that should not be there, or with ``-`` before it one that is left out, and its hint. The
            first that applies is told.
        otherwise: the hint for anything else.
    """

    def judge(answer: str | frozenset[str], evidence: Evidence) -> Outcome:
        true = find(evidence)
        compared = {"you": in_words(answer)}
        if answer == true or (isinstance(answer, str) and answer in true):
            return right(why, compared)
        given = frozenset([answer]) if isinstance(answer, str) else answer
        slips = given - true | {f"-{word}" for word in true - given}
        return wrong(next((hint for word, hint in mistakes if word in slips), otherwise), compared)

    return judge


def _distance(off: float, within: float) -> str:
    """Return how far a guess is from a figure, in words."""
    if abs(off) < min(_SAME, within):
        return "on it"
    return f"{1 + off:.3g} times that" if off > 1 else f"{_percent(abs(off))} {'above' if off > 0 else 'below'}"


def _within(share: float) -> str:
    return f"within {_percent(share)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def _off(guess: float, true: float) -> float:
    """Return by which share of a figure a guess is above it."""
    return (guess - true) / abs(true) if true else float(guess != true)
