"""A case: an exercise about one function of the student's, which is run and measured on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ....shared.errors import Stalled
from ...answers import Nothing
from ...evidence import MOST_S, Evidence
from ...exercise import Exercise, Outcome, wrong

NUMBER = "clinic"
Judge = Callable[[Sequence[dict[str, Any]]], Outcome]
"""Takes what was measured on every rank."""


def case(
    place: int, title: str, asks: str, function: str, harness: str, judge: Judge, hints: tuple[str, ...]
) -> Exercise:
    """Return the exercise about a function that a cell defines on the ranks.

    Args:
        place: of the case in the clinic.
        title: a few words.
        asks: what is to be changed.
        function: the name of it.
        harness: the module in ``course/on_ranks`` that measures it.
        judge: says what comes of that.
        hints: from a nudge to nearly the answer.
    """

    def judged(_: None, evidence: Evidence) -> Outcome:
        try:
            return judge(evidence.of_function(function, harness))
        except Stalled:
            return wrong(
                f"{function}() did not come back: ranks waited for each other, and were freed. Where one rank calls a "
                "collective operation, such as a broadcast, all ranks must."
            )
        except TimeoutError:
            return wrong(f"{function}() did not come back within {MOST_S:.0f} s, and was stopped.")

    return Exercise(f"{NUMBER}.{place}", title, asks, Nothing(), judged, hints)
