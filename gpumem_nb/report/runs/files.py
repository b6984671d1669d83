"""Runs in files for other programs and other people."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...shared.errors import InvalidInput, SetupError
from ...shared.state_file import as_path
from ..tables import BEGIN as HTML
from ..tables import page
from ..written import Written, write_over

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
