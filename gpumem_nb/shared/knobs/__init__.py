"""One file for each knob, or each few that belong together, and the table that lists them.

A new knob is a :class:`Knob` in a file of its own and a line in :mod:`.table`. Everything else reads the table: parser,
completion, panel, advice, what is tried out after memory ran out, and each rank when it applies settings.
"""

from __future__ import annotations

from .knob import CHANGES, KEEPS, KEEPS_TO_ROUNDING, Knob, LiveModel, Need
from .table import KNOBS, additional, register

__all__ = [
    "CHANGES",
    "KEEPS",
    "KEEPS_TO_ROUNDING",
    "KNOBS",
    "Knob",
    "LiveModel",
    "Need",
    "additional",
    "register",
]
