"""The lessons by number. A new one is a file beside this, named here."""

from __future__ import annotations

from ..exercise import Content
from . import clinic, lesson_1, lesson_2, lesson_3, lesson_4, lesson_5

LESSONS: dict[str, Content] = {
    module.LESSON.number: module.LESSON for module in (lesson_1, lesson_2, lesson_3, lesson_4, lesson_5, clinic)
}
