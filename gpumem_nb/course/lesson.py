"""A lesson as a notebook holds it: check, hint, status, reset."""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

from ..report.lesson import CheckReport, ExerciseState, HintReport, LessonReport
from ..report.written import written_over
from ..shared.errors import GpumemError, InvalidInput, RankError, Stalled, TrainingFailed, WorkloadError
from ..shared.state_file import as_path
from .answers import in_words, missing
from .evidence import Evidence, NotReady
from .exercise import RIGHT, Content, Exercise, Outcome, not_ready, wrong
from .lessons import LESSONS
from .progress import Progress, as_json

BEGIN = b'{"gpumem_nb_course": '
GRADING = "NBGRADER_EXECUTION"
"""Set by nbgrader around a notebook that it grades or validates: an answer that is not right must be an error there."""


class NotRight(GpumemError):
    """What a check raises inside nbgrader where the answer is not right."""


def lesson(number: str | int) -> Lesson:
    """Return a lesson of the course, by its number; the same one each time.

    Raises:
        InvalidInput: there is no such lesson.
    """
    found = LESSONS.get(str(number).strip())
    if found is None:
        raise InvalidInput(f"There is no lesson {number!r}. There are: {', '.join(LESSONS)}.")
    return _lesson(found.number)


@cache
def _lesson(number: str) -> Lesson:
    return Lesson(LESSONS[number])


def lesson_of(exercise: str) -> Lesson:
    """Return the lesson of an exercise, such as ``1.2``.

    Raises:
        InvalidInput: there is no such lesson.
    """
    return lesson(str(exercise).partition(".")[0])


class Lesson:
    """A lesson of the course; made by :func:`lesson`."""

    def __init__(self, content: Content) -> None:
        self.number = content.number
        self.title = content.title
        self.exercises: Sequence[Exercise] = content.exercises
        self._progress = Progress(content.number)

    def check(self, exercise: str, answer: Any = None) -> CheckReport:
        """Judge an answer by what is measured, and say why it is right, or which misconception it shows.

        Args:
            exercise: its number, such as ``"1.2"``.
            answer: in the form that the exercise asks for; none where it looks at the session.

        Raises:
            InvalidInput: there is no such exercise, or the answer is not of its form.
            NoSession, ClusterDied, Interrupted: it could not be measured.
            NotRight: inside nbgrader, the answer is not right.
        """
        asked = self.exercise(exercise)
        outcome, answered = _judged(asked, answer)
        self._progress.change(asked.number, lambda tried: tried.checked(outcome, answered))
        report = CheckReport(
            asked.number, asked.title, outcome.state, answered, outcome.compared, outcome.said, self._progress.trouble
        )
        if outcome.state != RIGHT and os.environ.get(GRADING):
            raise NotRight(str(report))
        return report

    def hint(self, exercise: str | None = None) -> HintReport:
        """Give one more hint, after those that were given already.

        Args:
            exercise: its number; without one, the first that is not right yet.

        Raises:
            InvalidInput: there is no such exercise.
        """
        asked = self.exercise(exercise) if exercise is not None else self._next() or self.exercises[0]
        told = self._progress.change(asked.number, lambda tried: tried.hinted(len(asked.hints))).hints
        return HintReport(asked.number, asked.asks, asked.hints[:told], len(asked.hints), self._progress.trouble)

    def status(self, path: str | os.PathLike[str] | None = None) -> LessonReport:
        """Show what the exercises ask and which are right.

        Args:
            path: also write it to a file to hand in, such as ``"lesson-1-ada.json"``.

        Raises:
            InvalidInput: the file cannot be written, or is something else.
        """
        tried = self._progress.all()
        trouble = self._progress.trouble
        written = ""
        if path is not None:
            target = as_path(path)
            about = {"lesson": self.number, "user": _user(), "time": time.time()}
            known = {one.number: tried[one.number] for one in self.exercises if one.number in tried}
            with written_over(target, BEGIN, "a lesson's status") as file:
                file.write(json.dumps(as_json(known) | about, indent=1).replace("{\n ", "{", 1).encode())
            written = f"Written: {target}. Hand it in."
        rows = tuple(
            ExerciseState(one.number, one.title, one.asks, done.state, done.tries, done.hints, done.first, done.answer)
            for one in self.exercises
            for done in [self._progress[one.number]]
        )
        return LessonReport(self.number, self.title, rows, tuple(filter(None, [written, trouble])))

    def reset(self) -> LessonReport:
        """Forget all answers and hints of this lesson, and show where it begins."""
        self._progress.forget()
        return self.status()

    def exercise(self, number: str) -> Exercise:
        """Return an exercise by its number, with or without the lesson's.

        Raises:
            InvalidInput: there is no such exercise here.
        """
        wanted = str(number).strip()
        known = {one.number: one for one in self.exercises}
        for name in (wanted, f"{self.number}.{wanted}"):
            if name in known:
                return known[name]
        elsewhere = wanted.partition(".")[0]
        if elsewhere != self.number and elsewhere in LESSONS:
            raise InvalidInput(f"Exercise {wanted} is not of lesson {self.number}: type %lesson check {wanted}")
        close = get_close_matches(wanted, known, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise InvalidInput(f"Lesson {self.number} has no exercise {wanted!r}.{meant} There are: {', '.join(known)}.")

    def _next(self) -> Exercise | None:
        tried = self._progress.all()
        return next(
            (one for one in self.exercises if one.number not in tried or tried[one.number].state != RIGHT), None
        )

    def __repr__(self) -> str:
        return f"<Lesson {self.number}: {self.title}, {len(self.exercises)} exercises>"


def _judged(asked: Exercise, answer: Any) -> tuple[Outcome, str]:
    """Return what comes of an answer, and the answer as it was read, in words."""
    read = None if missing(answer) else asked.answer.read(answer)
    if read is None and not asked.answer.nothing:
        return not_ready(f"This waits for your answer: {asked.answer.expected}. {asked.asks}"), ""
    answered = in_words(answer if isinstance(answer, str) else read)
    try:
        return asked.judge(read, Evidence()), answered
    except (NotReady, TrainingFailed, WorkloadError) as error:
        return not_ready(str(error)), ""
    except Stalled as error:
        return wrong("Your code lets ranks wait for ranks that never come.", str(error)), answered
    except RankError as error:
        return wrong(f"Your code failed on rank {error.rank}: {error.ename}: {error.evalue}"), answered


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return str(os.getuid())
