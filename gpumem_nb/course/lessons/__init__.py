"""The lessons by number. A new one is a file beside this, named here."""

from __future__ import annotations

from ..exercise import Content
from . import clinic, lesson_1, lesson_2, lesson_3

LESSONS: dict[str, Content] = {
    content.number: content for content in (lesson_1.LESSON, lesson_2.LESSON, lesson_3.LESSON, clinic.LESSON)
}
