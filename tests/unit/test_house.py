"""What keeps the house walkable: short files, and a root that holds the face only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_nb.shared import errors

ROOT = Path(__file__).parents[2]
FACE = {"__init__.py", "demo.py"}  # beside session/ and magics/
MOST_LINES = 400


@pytest.mark.parametrize("folder", ["gpumem_nb", "tests", ".ci"])
def test_no_file_is_longer_than_one_reads(folder: str) -> None:
    sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".c", ".cpp", ".h"}]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert lines, "nothing was found"
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_the_packages_root_holds_the_face_only() -> None:
    assert {path.name for path in (ROOT / "gpumem_nb").glob("*.*")} == FACE


def public_functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            if isinstance(node, ast.FunctionDef):
                yield node
            else:
                yield from public_functions(node)


def raised_by(function: ast.AST) -> Iterator[str]:
    """The classes of what it raises by itself, apart from functions inside of it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            yield node.exc.func.id
        yield from raised_by(node)


def test_public_functions_say_what_they_raise() -> None:
    ours = {name for name, value in vars(errors).items() if isinstance(value, type)}
    # Magics show what they raise as a UsageError.
    files = [path for path in (ROOT / "gpumem_nb").rglob("*.py") if path.parent.name != "magics"]
    unsaid = [
        f"{path.relative_to(ROOT)}: {function.name} raises {name}"
        for path in files
        for function in public_functions(ast.parse(path.read_text()))
        for name in raised_by(function)
        if name in ours and name not in (ast.get_docstring(function) or "")
    ]
    assert unsaid == []
