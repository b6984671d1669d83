"""Runs in files: for other programs and people, and as bytes that a file of training state holds beside the weights."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...shared.errors import InvalidInput, SetupError, StateFileError
from ...shared.state_file import as_path
from ..tables import BEGIN as HTML
from ..tables import page
from ..written import Written, write_over
from .columns import latest
from .row import Row

if TYPE_CHECKING:
    import pandas as pd

NOTHING = "Nothing has been tried yet. Train some steps first: %hvd_train 20"
_CSV = b"run,workload,"
_BEGINS = {".csv": _CSV, ".parquet": b"PAR1", ".html": HTML}
"""The kinds of files there are, and how a file begins that may be written over."""
_PLAIN = {str, bool, int, float}


def write(
    path: str | os.PathLike[str], count: int, frame: Callable[[], pd.DataFrame], html: Callable[[], str]
) -> Written:
    """Write so many runs to a file of the kind that its name says, from what makes their data or their table.

    Raises:
        InvalidInput: another kind, nothing to write, or a file that cannot be written or is of something else.
        SetupError: there is no pyarrow that pandas can use.
    """
    target = as_path(path)
    kind = target.suffix.lower()
    if kind not in _BEGINS:
        raise InvalidInput(f"{target.name} cannot be written: name a file that ends in .csv, .parquet or .html.")
    if not count:
        raise InvalidInput(NOTHING)
    if kind == ".html":
        data = page("Runs", [html()]).encode("utf-8", "backslashreplace")
    elif kind == ".csv":
        data = frame().to_csv(index=False).encode()
    else:
        data = _parquet(frame())
    holds = f"It has {count} run{'s' * (count > 1)}, and all that was measured of them."
    return write_over(target, data, _BEGINS[kind], holds)


def _parquet(frame: pd.DataFrame) -> bytes:
    """Turn values of mixed types into text: a Parquet column has one type, and your own knobs may have any values."""
    for name in [name for name in frame.columns if frame[name].dtype.kind == "O"]:
        known = [None if _unknown(value) else value for value in frame[name]]
        kinds = {type(value) for value in known if value is not None}
        if len(kinds) > 1 or not kinds <= _PLAIN:
            frame[name] = [None if value is None else str(value) for value in known]
    stream = io.BytesIO()
    try:
        frame.to_parquet(stream, index=False, engine="pyarrow")
    except ImportError:
        raise SetupError(
            "Parquet files are written by pyarrow, which is not installed, or too old: pip install -U pyarrow"
        ) from None
    return stream.getvalue()


def _unknown(value: Any) -> bool:
    return value is None or value != value  # not a number


FORMAT = 1
_MOST_BYTES = 2**28  # unpacked: more was not written by this
_MOST_ROWS = 10_000  # of which none takes more than 20 KB
_NOT_ROWS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    zlib.error,
)


def packed(rows: Sequence[Row]) -> bytes:
    """Rows as they are stored; of more than :func:`unpacked` would read those that began last."""
    kept = latest(rows, _MOST_ROWS)
    return zlib.compress(json.dumps({"format": FORMAT, "rows": [row.saved() for row in kept]}).encode())


@dataclass(frozen=True, slots=True)
class ImportedRuns:
    """The runs imported from a file: how many rows were not there yet, and how many of the file's cannot be read."""

    path: Path
    new: int
    unread: int

    def __str__(self) -> str:
        came = f"{self.new} run{'s' * (self.new != 1)} came from {self.path}."
        return f"{came} {_unread_text(self.unread)}".rstrip()


def readable(data: bytes) -> tuple[list[Row], str]:
    """Return the rows of a state, none if it holds none, and a sentence about what cannot be read; never fail."""
    try:
        rows, unread = unpacked(data) if data else ([], 0)
    except StateFileError as error:
        return [], str(error)
    return rows, _unread_text(unread)


def unpacked(data: bytes) -> tuple[list[Row], int]:
    """Return the rows that are stored, and how many there are besides that this version cannot read.

    Raises:
        StateFileError: this is not a record of runs.
    """
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(data, _MOST_BYTES)
        if not unpacking.eof:
            raise ValueError(data)
        saved = json.loads(text)["rows"]
        if not isinstance(saved, list):
            raise TypeError(saved)
    except _NOT_ROWS:
        raise StateFileError("Its record of runs cannot be read: it is damaged, or of a newer gpumem_nb.") from None
    rows = []
    for one in saved:
        try:
            rows.append(Row.from_saved(one))
        except _NOT_ROWS:
            continue
    return rows, len(saved) - len(rows)


def _unread_text(unread: int) -> str:
    some = f"{unread} run{'s' * (unread != 1)}"
    return f"{some} of it cannot be read: damaged, or of a newer gpumem_nb." if unread else ""
