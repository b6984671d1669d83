"""Seeds: which are allowed, and which one is used if you give none."""

from __future__ import annotations

import operator
from typing import Any

from .errors import InvalidInput

DEFAULT_SEED = 0
LARGEST_SEED = 2**32 - 1
"""NumPy's global random numbers take no larger one."""


def checked_seed(value: Any) -> int:
    """Return a seed given as a number or, as magics pass it, as text; ``InvalidInput`` says what is allowed."""
    try:
        if isinstance(value, bool):
            raise TypeError
        seed = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        seed = -1
    if not 0 <= seed <= LARGEST_SEED:
        raise InvalidInput(f"seed={value!r} cannot be used: it must be a whole number from 0 to {LARGEST_SEED}.")
    return seed
