"""Sentences about cells that cannot be reproduced."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..shared.errors import WorkloadError
from ..shared.questions import Cell
from .imports import brought_by_all
from .plain import defining_magic
from .statements import NOTEBOOK

_SHOWN = 70  # characters


def missing(cells: Sequence[Cell], names: Collection[str], forgotten: bool) -> WorkloadError:
    """Names that are needed, and that no known cell defines."""
    name = min(names)
    magic = next(filter(None, (defining_magic(cell.source, name) for cell in cells)), "")
    if name in NOTEBOOK:
        what = "display() is" if name == "display" else "lines with % and ! are"
        return WorkloadError(
            f"A cell that made what is trained has something that a script cannot do: {what} IPython's own. Write that "
            "in plain Python, or in a cell of its own that draws no random numbers. Run %hvd_seed and the cells that "
            "made model and data again, and attach again."
        )
    where = (
        "it was pushed from the notebook"
        if any(name in cell.pushed for cell in cells)
        else f"code under {magic} does, which is not read. Write it without {magic}"
        if magic
        else "the cells that did are too long ago, or ran before the ranks were started again"
        if forgotten
        else "a cell imports * from a module, and that does not say what. Import it by its name"
        if any(cell.known and brought_by_all(cell.source) is None for cell in cells)
        else "no %%hvd cell that succeeded on all ranks defines it"
    )
    return WorkloadError(
        f"The script needs {name}, and cannot define it: {where}. Define it in a %%hvd cell, run those after it "
        "again, and attach again."
    )


def refuse_unclear(cell: Cell, name: str, defined: bool) -> None:
    """Refuse a name that a cell may have bound, if it cannot be told whether it did.

    Raises:
        WorkloadError: always.
    """
    if cell.offered:
        raise WorkloadError(
            f"The script needs {name}, which was what the ranks offer of something that no cell made. Make it in a "
            "%%hvd cell, run those after it again, and attach again."
        )
    if cell.pushed and not defined:
        raise missing([cell], [name], False)
    how = (
        "was defined or used in a cell that ran on some ranks only"
        if not cell.everywhere
        else "was pushed from the notebook"
        if cell.pushed
        else "is in a cell that failed"
    )
    raise WorkloadError(
        f"What {name} is cannot be told: after its last cell it {how}. Run its %%hvd cell again on all ranks, and "
        "those that use it, and attach again."
    )


def refuse_setting(cell: Cell, text: str) -> None:
    """Refuse a setting of the whole process if it cannot be told whether it was made on all ranks.

    Raises:
        WorkloadError: always.
    """
    how = "that ran on some ranks only" if not cell.everywhere else "that failed"
    raise WorkloadError(
        f"Whether `{in_short(text)}` holds cannot be told: it is in a cell {how}. Run it again on all ranks, in a cell "
        "that ends well, then the cells that made model and data, and attach again."
    )


def refuse_everything(text: str, name: str) -> None:
    """Refuse an import of ``*`` that may have defined what is needed, or replaced it.

    Raises:
        WorkloadError: always.
    """
    raise WorkloadError(
        f"What {name} is cannot be told: a cell says `{in_short(text)}`, which may have defined or replaced it. Import "
        "what you need by its name, run that and the cells after it again, and attach again."
    )


def refuse_code(text: str, why: str) -> None:
    """Refuse a statement that cannot stand in a script.

    Raises:
        WorkloadError: always.
    """
    raise WorkloadError(
        f"`{in_short(text)}` is in a cell that the script needs, and {why}. Take it out of that cell, run the cells "
        "that made model and data again, and attach again."
    )


def refuse_magic() -> None:
    """Refuse lines of IPython's that drew random numbers, which a script does not do again.

    Raises:
        WorkloadError: always.
    """
    raise WorkloadError(
        "A cell that made what is trained has something that a script cannot do: lines with % and ! are IPython's own. "
        "Write that in plain Python, or in a cell of its own that draws no random numbers. Run %hvd_seed and the cells "
        "that made model and data again, and attach again."
    )


def refuse_annotations(text: str) -> None:
    """Refuse cells of which some evaluate annotations and some do not, because a script does one or the other.

    Raises:
        WorkloadError: always.
    """
    raise WorkloadError(
        f"A cell says `from __future__ import annotations`, and the one with `{text}` does not, so their annotations "
        "mean different things, and a script has one meaning. Write that line into both cells or neither, run them "
        "again, and attach again."
    )


def refuse_odd_save(text: str) -> None:
    """Refuse to write files again that were written while a model was made, with what was done for that.

    Raises:
        WorkloadError: always.
    """
    raise WorkloadError(
        f"`{in_short(text)}` writes a file, which a script shall not do again, and calls something that may change "
        "model, data or random numbers. Do that in a statement of its own: run %hvd_seed and those cells again, and "
        "attach again."
    )


def in_short(text: str) -> str:
    """Return a statement as it is shown in a sentence: its first line that is no comment."""
    lines = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    shown = lines[0].strip()
    return shown if len(lines) == 1 and len(shown) <= _SHOWN else f"{shown[:_SHOWN]} …"


def refuse_drawing(cell: Cell) -> None:
    """Refuse random numbers that cannot be drawn again.

    Raises:
        WorkloadError: always.
    """
    how = (
        "A function that session.run brought to the ranks"
        if cell.opaque
        else "A cell that failed"
        if cell.everywhere
        else "A cell that ran on some ranks only"
    )
    raise WorkloadError(
        f"{how} drew random numbers, and what was made after it follows from them. Run %hvd_seed and the cells that "
        "made model and data again, and attach again."
    )
