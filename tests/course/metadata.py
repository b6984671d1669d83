"""Write what all notebooks of the course have in common: ``python -m tests.course.metadata FILE…``.

That is nbgrader's metadata for cells whose id is ``answer-1-2`` or ``check-1-2``, the kernel, and no outputs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat

from tests.course.notebooks import exercise_of, nbgrader, read

KERNEL = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def completed(notebook: Any) -> Any:
    """Return a notebook as it is kept in the checkout."""
    kept = nbformat.from_dict(notebook)
    kept.metadata = nbformat.from_dict(KERNEL)
    kept.nbformat, kept.nbformat_minor = 4, 5
    for cell in kept.cells:
        cell.metadata = nbformat.from_dict({"nbgrader": nbgrader(cell)} if exercise_of(cell) else {})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return kept


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(completed(read(Path(name))), name)
