"""The record as bytes, which a file of training state holds beside the weights."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

from ...shared.errors import StateFileError
from .row import Row

FORMAT = 1
_MOST_BYTES = 2**28  # unpacked: more was not written by this
_NOT_ROWS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, zlib.error)


def packed(rows: Sequence[Row]) -> bytes:
    """Rows as they are stored."""
    text = json.dumps({"format": FORMAT, "rows": [row.saved() for row in rows]})
    return zlib.compress(text.encode())


def unpacked(data: bytes) -> list[Row]:
    """The rows that are stored; one that this version cannot read is left out.

    Raises:
        StateFileError: this is no record of runs.
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
    return rows
