"""Runs in files for other programs and other people."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from ...shared.errors import InvalidInput, SetupError
from ...shared.state_file import as_path
from ..page import BEGIN as HTML
from ..page import page
from ..written import Written, write_over

if TYPE_CHECKING:
    from .record import Runs

_CSV = b"run,workload,"
_BEGINS = {".csv": _CSV, ".parquet": b"PAR1", ".html": HTML}
"""The kinds of files there are, and how a file begins that may be written over."""
_PLAIN = {str, bool, int, float}


def write(runs: Runs, path: str | os.PathLike[str]) -> Written:
    """Write runs to a file of the kind that its name says.

    Raises:
        InvalidInput: another kind, nothing to write, or a file that cannot be written or is of something else.
        SetupError: there is no pyarrow that pandas can use.
    """
    target = as_path(path)
    kind = target.suffix.lower()
    if kind not in _BEGINS:
        raise InvalidInput(f"{target.name} cannot be written: name a file that ends in .csv, .parquet or .html.")
    if not len(runs):
        raise InvalidInput(str(runs))
    data = {".csv": _csv, ".parquet": _parquet, ".html": _html}[kind](runs)
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    return write_over(target, data, _BEGINS[kind], f"It has {count}, and all that was measured of them.")


def _csv(runs: Runs) -> bytes:
    return bytes(runs.frame().to_csv(index=False).encode())


def _parquet(runs: Runs) -> bytes:
    """A column of a Parquet file has one type, and knobs of one's own any values: what is of several becomes words."""
    frame = runs.frame()
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


def _html(runs: Runs) -> bytes:
    return page("Runs", [runs.unfolded._repr_html_()]).encode("utf-8", "backslashreplace")
