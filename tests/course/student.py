"""A student: a kernel in which the cells of a notebook are run, with answers in place of dots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.course.notebooks import CHECK, exercise_of

CELL_TIMEOUT_S = 300
_EVIDENCE = "from gpumem_nb.course.evidence import Evidence as _Evidence\nmeasure = _Evidence().measure"


class Student:
    """Runs cells in a kernel.

    Attributes:
        notebook: what the student has before them.
        seconds: that all cells took.
    """

    def __init__(self, notebook: Any, client: NotebookClient) -> None:
        self.notebook = notebook
        self.seconds = 0.0
        self._client = client

    def does(self, source: str) -> str:
        """Run a cell with this source and return what it showed as text; raises what it raised."""
        cell = nbformat.v4.new_code_cell(source)
        self.notebook.cells.append(cell)  # the client looks cells up by their place
        began_s = time.monotonic()
        try:
            self._client.execute_cell(cell, len(self.notebook.cells) - 1)
        finally:
            self.seconds += time.monotonic() - began_s
            self.notebook.cells.pop()
        return "\n".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)

    def answers(self, exercise: str, answer: str) -> tuple[str, str]:
        """Run an answer and its check; return the state of the exercise, and what was said."""
        check = next(cell.source for cell in self.notebook.cells if cell.id == CHECK + exercise.replace(".", "-"))
        try:
            self.does(answer)
            said = self.does(check)
        except CellExecutionError as error:
            return "refused", f"{error.ename}: {error.evalue}"
        return self.state, said

    @property
    def state(self) -> str:
        """Return what the check that was run last found."""
        return self.does("print(_.state)").strip()

    def finds(self, expression: str) -> float:
        """Return the value of an expression, in which ``measure`` is :meth:`Evidence.measure`."""
        self.does(_EVIDENCE)
        return float(self.does(f"print(float({expression}))"))

    def exercises(self) -> Iterator[tuple[Any, str]]:
        """Yield each code cell with the exercise that it belongs to; the notebook may not change meanwhile."""
        for cell in list(self.notebook.cells):
            if cell.cell_type == "code":
                yield cell, exercise_of(cell)


@contextmanager
def student(notebook: Any, folder: Path) -> Iterator[Student]:
    """Start a kernel for a copy of a notebook, in a folder for what it writes beside itself."""
    copy = nbformat.from_dict(notebook)
    client = NotebookClient(copy, timeout=CELL_TIMEOUT_S, resources={"metadata": {"path": str(folder)}})
    with client.setup_kernel():
        yield Student(copy, client)
