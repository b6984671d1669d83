"""The record as bytes, which a file of training state holds beside the weights."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...shared.errors import StateFileError
from .curve import Curve
from .row import Row

FORMAT = 1
_MOST_BYTES = 2**28  # unpacked: more was not written by this
_FRAME_BYTES, _COMMA_BYTES = 64, 2  # around all rows, and between two of them
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
    """Rows as they are stored; beyond what :func:`unpacked` reads the oldest without their curves, or not at all."""
    left = _MOST_BYTES - _FRAME_BYTES
    texts: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: row.began_s, reverse=True):
        for one in (row, replace(row, curve=Curve())):
            text = json.dumps(one.saved())
            if len(text) + _COMMA_BYTES <= left:
                texts[row.key] = text
                left -= len(text) + _COMMA_BYTES
                break
    kept = ", ".join(texts[row.key] for row in rows if row.key in texts)
    return zlib.compress(f'{{"format": {FORMAT}, "rows": [{kept}]}}'.encode())


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
