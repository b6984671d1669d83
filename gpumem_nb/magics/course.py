"""The course: answers checked, hints, and where one stands."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import argument

from ..course.lesson import Lesson, lesson, lesson_of
from ..course.lessons import LESSONS
from ..shared.errors import InvalidInput, nearest
from .arguments import COURSE_VERBS, magic, shell_of

_MOST = {"hint": 0, "reset": 0, "status": 1}  # words after the number


@magics_class
class CourseMagics(Magics):
    """The course: answers checked, hints, and where one stands."""

    @magic()
    @argument(
        "words",
        nargs="*",
        help="a lesson's number to show it; or check 1.2 ANSWER, hint 1.2, status 1 [PATH], reset 1. An answer may be "
        "a variable of the notebook",
    )
    def lesson(self, args: Namespace) -> Any:
        """Show a lesson's exercises, check an answer, give a hint, write a file to hand in, or begin anew.

        Such as: %lesson 1, %lesson check 1.2 41 MB, %lesson hint 1.2, %lesson status 1 ada.json, %lesson reset 1.
        """
        if not args.words:
            titles = "; ".join(f"{number} {content.title}" for number, content in LESSONS.items())
            raise InvalidInput(f"Name a lesson, such as %lesson 1. There are: {titles}.")
        verb, *rest = args.words
        if verb in LESSONS and not rest:
            return lesson(verb).status()
        if verb not in COURSE_VERBS:
            raise InvalidInput(f"{verb!r} is not known: {nearest(verb, [*COURSE_VERBS, *LESSONS])}.")
        if not rest:
            raise InvalidInput(f"Say which one: %lesson {verb} {COURSE_VERBS[verb]}")
        number, *more = rest
        if len(more) > _MOST.get(verb, len(more)):
            raise InvalidInput(f"{' '.join(more)!r} is too much. Write %lesson {verb} {COURSE_VERBS[verb]}")
        if verb == "check":
            of = lesson_of(number)
            return of.check(number, self._answer(of, number, " ".join(more)))
        if verb == "hint":
            return lesson_of(number).hint(None if number in LESSONS else number)
        return lesson(number).reset() if verb == "reset" else lesson(number).status(*more)

    def _answer(self, of: Lesson, number: str, typed: str) -> Any:
        """Return a variable of the notebook where one is named, unless the exercise is answered by words or names."""
        named = shell_of(self).user_ns
        return named[typed] if typed in named and of.exercise(number).answer.takes_values else typed
