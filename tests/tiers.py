"""Which cases of a test run in ``make test``, and which in ``make test-full`` only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def first_tier(cases: Iterable[Any], keep: Callable[[int, Any], bool]) -> list[Any]:
    """Return the cases as pytest's parameters, those that ``keep(index, case)`` does not choose marked as ``full``.

    A case that is a tuple gives several parameters.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if keep(index, case) else pytest.mark.full
        )
        for index, case in enumerate(cases)
    ]


def every(step: int) -> Callable[[int, Any], bool]:
    """Choose each ``step``-th case, the first one included."""
    return lambda index, case: index % step == 0
