"""What a user has done of a lesson: a small file in the user's data, read and written with every check.

So it outlives kernels, and two notebooks of one user share it. A file that cannot be read or written never costs a
check: that is said in a sentence, and this kernel remembers.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from ..shared.state_file import why_not, written_whole
from .exercise import OPEN, RIGHT, WRONG, Outcome

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Tried:
    """What was done of one exercise.

    Attributes:
        state: ``right`` once it was, whatever was tried later; ``not yet``; ``open``.
        tries: answers that were judged, until one was right.
        hints: how many were told.
        first: the first answer in words, which is the prediction.
        answer: the one that was right, or else the latest.
        time: of the latest change, in seconds since 1970.
    """

    state: str = OPEN
    tries: int = 0
    hints: int = 0
    first: str = ""
    answer: str = ""
    time: float = 0.0

    def checked(self, outcome: Outcome, answer: str) -> Tried:
        """Return it after a check."""
        if outcome.state == OPEN or self.state == RIGHT:
            return self
        return dataclasses.replace(
            self,
            state=outcome.state,
            tries=self.tries + 1,
            first=self.first if self.tries else answer,
            answer=answer,
            time=time.time(),
        )

    def hinted(self, of: int) -> Tried:
        """Return it after one more of so many hints."""
        return dataclasses.replace(self, hints=min(self.hints + 1, of), time=time.time())


def root() -> Path:
    """Return the folder of this user's progress. It is no cache: what was solved cannot be made again."""
    return platformdirs.user_data_path("gpumem_nb") / "course"


class Progress:
    """The progress of one lesson.

    Attributes:
        trouble: what is wrong with its file, in a sentence; empty while nothing is.
    """

    def __init__(self, lesson: str) -> None:
        self._lesson = lesson
        self.trouble = ""
        self._remembered: dict[str, Tried] = {}

    @property
    def path(self) -> Path:
        """Return where it is kept."""
        return root() / f"lesson-{self._lesson}.json"

    def __getitem__(self, exercise: str) -> Tried:
        return self.all().get(exercise, Tried())

    def all(self) -> dict[str, Tried]:
        """Return what was done, by the number of the exercise."""
        self.trouble = ""
        return {**self._read(), **self._remembered}

    def change(self, exercise: str, change: Callable[[Tried], Tried]) -> Tried:
        """Keep what ``change`` makes of an exercise's state."""
        tried = self.all()
        before = tried.get(exercise, Tried())
        after = change(before)
        if after != before or self._remembered:
            self._write({**tried, exercise: after})
        return after

    def forget(self) -> None:
        """Begin anew."""
        self.trouble = ""
        self._remembered = {}
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self.trouble = f"Your earlier progress stays in {self.path}: {why_not(error)}."

    def _read(self) -> dict[str, Tried]:
        try:
            return parsed(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.trouble = f"Your progress in {self.path} cannot be read ({error.strerror}): this kernel remembers it."
        except ValueError:
            aside = self.path.with_suffix(".damaged")
            self.trouble = f"Your progress in {self.path} was damaged, so it begins anew. The old file is now {aside}"
            with suppress(OSError):
                self.path.replace(aside)
        return {}

    def _write(self, tried: dict[str, Tried]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(self.path) as file:
                file.write(json.dumps(as_json(tried), indent=1).encode())
            self._remembered = {}
        except OSError as error:
            self._remembered = tried
            self.trouble = f"Your progress cannot be kept in {self.path}: {why_not(error)}. This kernel remembers it."


def as_json(tried: dict[str, Tried]) -> dict[str, Any]:
    """Return what a file holds."""
    return {
        "gpumem_nb_course": FORMAT,
        "exercises": {number: dataclasses.asdict(one) for number, one in tried.items()},
    }


def parsed(content: bytes) -> dict[str, Tried]:
    """Return what a file holds.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        found = json.loads(content)
        if found["gpumem_nb_course"] != FORMAT:
            raise ValueError(f"it is of format {found['gpumem_nb_course']}")
        return {str(number): _checked(Tried(**one)) for number, one in found["exercises"].items()}
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError("it is not a lesson's progress") from error


def _checked(tried: Tried) -> Tried:
    """Return what was read, if every value is of its type; raises ``ValueError``."""
    numbers = isinstance(tried.tries, int) and isinstance(tried.hints, int) and isinstance(tried.time, int | float)
    words = isinstance(tried.first, str) and isinstance(tried.answer, str) and tried.state in (RIGHT, WRONG, OPEN)
    if not numbers or not words:
        raise ValueError("its values are of other types")
    return tried
