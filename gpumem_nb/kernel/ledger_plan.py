"""How often the memory of a step is recorded, and what that costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

EVERY_STEPS = 20  # one is recorded, or one of a multiple of them
MOST_SHARE = 0.005  # of the time, that recording may take by itself


def recorded_every(asked: int | str, recorded_s: Sequence[float], others_s: Sequence[float]) -> int:
    """Return one in how many steps is recorded; 0 for none.

    Args:
        asked: what the policy says: a number, ``auto`` or ``never``.
        recorded_s: seconds of steps that were recorded. Few are, and other programs hold some of them up: the shortest
            counts.
        others_s: seconds of other steps.
    """
    if asked == "auto":
        longer = min(recorded_s) / statistics.median(others_s) - 1 if recorded_s and others_s else 0.0
        return EVERY_STEPS * max(1, math.ceil(longer / (EVERY_STEPS * MOST_SHARE)))
    return 0 if asked == "never" else int(asked)


def cost(recorded_s: Sequence[float], others_s: Sequence[float]) -> float | None:
    """Return what recording steps has cost on average, as a share of training time; ``None`` before it is known."""
    if not recorded_s or not others_s:
        return None
    longer = statistics.median(recorded_s) / statistics.median(others_s) - 1
    return max(0.0, longer) * len(recorded_s) / (len(recorded_s) + len(others_s))
