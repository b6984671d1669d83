"""nbgrader, which is no dependency, takes a lesson as an assignment: cells come out as they are, locked and graded."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.course.notebooks import ANSWER, CHECK, NOTEBOOKS, read

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def test_a_lesson_becomes_an_assignment(tmp_path: Path) -> None:
    lesson, course = NOTEBOOKS[0], tmp_path / "course"
    venv.create(tmp_path / "own", with_pip=True)
    programs = str(tmp_path / "own" / "bin")
    subprocess.run([f"{programs}/pip", "install", "--quiet", "nbgrader>=0.9,<1"], check=True, capture_output=True)
    (course / "source" / "lesson").mkdir(parents=True)
    shutil.copy(lesson, course / "source" / "lesson")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = clean | {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    command = [f"{programs}/nbgrader", "generate_assignment", "lesson", "--ClearSolutions.enabled=False"]
    done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    released = {cell.id: cell for cell in read(course / "release" / "lesson" / lesson.name).cells}
    for cell in read(lesson).cells:
        assert released[cell.id].source == cell.source
        if cell.id.startswith((ANSWER, CHECK)):
            about = released[cell.id].metadata.nbgrader
            assert about.checksum
            assert about.locked == (about.points == 1 if cell.id.startswith(CHECK) else False)
