"""What keeps the house walkable: short files, and a root that holds the face only."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FACE = {"__init__.py", "completion.py", "demo.py"}  # beside session/ and magics/
MOST_LINES = 400


@pytest.mark.parametrize("folder", ["gpumem_nb", "tests", ".ci"])
def test_no_file_is_longer_than_one_reads(folder: str) -> None:
    sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".c", ".cpp", ".h"}]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert lines, "nothing was found"
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_the_packages_root_holds_the_face_only() -> None:
    assert {path.name for path in (ROOT / "gpumem_nb").glob("*.*")} == FACE
