"""A check that ranks hold the same, by numbers that all of them compare."""

from __future__ import annotations

from collections.abc import Sequence

from .communicator import here


def same_everywhere(number: int, about: str) -> bool:
    """Return whether all ranks have the same number, below 2**63. All ranks ask; ``about`` names the question."""
    return alike([number], about)[0]


def alike(numbers: Sequence[int], about: str) -> list[bool]:
    """Return for each of these numbers whether all ranks have the same, below 2**63. All ranks ask."""
    rows = here().numbers(numbers, about)
    return [all(row[place] == number for row in rows) for place, number in enumerate(numbers)]
