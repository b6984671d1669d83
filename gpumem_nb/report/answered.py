"""Answers of the doctor and the tuner, as the record of runs and a report show them afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .tables import Table

DOCTOR, TUNER = "doctor", "tuner"
_SHOWN = 3  # below a table of runs, the latest
_LONGEST = 240  # letters of one there; a report has all


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer.

    Attributes:
        who: ``doctor`` or ``tuner``.
        said: the answer in sentences.
        step: after which it was given.
        time_s: when, in seconds since 1970.
        workload: what was loaded.
    """

    who: str
    said: str
    step: int
    time_s: float
    workload: str

    @property
    def at(self) -> str:
        """Return the time of day, on this machine's clock."""
        return time.strftime("%H:%M", time.localtime(self.time_s))


def answers_below(answers: Sequence[Answered]) -> list[str]:
    """Return a sentence for each of the latest answers, to stand below a table of runs."""
    notes = [
        f"The {one.who} after step {one.step:,} of {one.workload}, at {one.at}: {_shortened(one.said)}"
        for one in answers[-_SHOWN:]
    ]
    earlier = len(answers) - len(notes)
    return [*([f"{earlier} earlier answers: %hvd_report report.html has all."] if earlier else []), *notes]


def answers_table(answers: Sequence[Answered]) -> Table:
    """Return all answers, the earliest first."""
    rows = tuple((one.at, f"{one.step:,}", one.workload, one.who, one.said) for one in answers)
    return Table("", ("at", "step", "workload", "who", "answer"), rows, frozenset({"workload", "who", "answer"}))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rsplit(' ', 1)[0]} …"
