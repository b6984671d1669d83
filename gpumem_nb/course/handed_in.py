"""Files that students handed in, as one table: a row for each, columns for each exercise."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from ..shared.errors import InvalidInput
from ..shared.state_file import as_path, why_not, written_whole
from .exercise import RIGHT
from .lesson import BEGIN
from .progress import parsed

_FORMULA = tuple("=+-@\t\r")  # what spreadsheets take for a formula


def read(path: Path) -> dict[str, Any]:
    """Return the row of a file.

    Raises:
        ValueError: it is not one that ``status(path)`` wrote.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    if not content.startswith(BEGIN):
        raise ValueError("it is not a lesson's status")
    tried = parsed(content)
    about = json.loads(content)
    try:
        written = datetime.fromtimestamp(float(about["time"]), UTC).isoformat(timespec="seconds")
    except (KeyError, OverflowError, TypeError) as error:
        raise ValueError("it does not say when it was written") from error
    row: dict[str, Any] = {
        "file": str(path),
        "user": str(about.get("user", "")),
        "lesson": str(about.get("lesson", "")),
        "written": written,
        "right": sum(one.state == RIGHT for one in tried.values()),
    }
    for number, one in sorted(tried.items()):
        row |= {
            number: one.state,
            f"{number} tries": one.tries,
            f"{number} hints": one.hints,
            f"{number} first answer": one.first,
        }
    return {name: _harmless(value) for name, value in row.items()}


def write(rows: Sequence[dict[str, Any]], file: IO[str]) -> None:
    """Write rows as CSV; those of several lessons have the columns of all."""
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, [*columns], restval="")
    writer.writeheader()
    writer.writerows(rows)


def main(arguments: Iterable[str]) -> int:
    """Read files, write a table, and name those that could not be read; the exit code is 1 if there were any."""
    parser = argparse.ArgumentParser(
        "python -m gpumem_nb.course", description="One table of files that were handed in."
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="what students wrote with lesson.status('name.json')")
    parser.add_argument("--out", metavar="PATH", help="write the table to this file, such as class.csv")
    given = parser.parse_args(list(arguments))
    rows, bad = [], 0
    for name in given.files:
        try:
            rows.append(read(Path(name)))
        except (OSError, ValueError) as error:
            bad += 1
            said = error.strerror if isinstance(error, OSError) else error
            print(f"{name} is left out: {said}.", file=sys.stderr)
    try:
        _put(rows, given.out)
    except (InvalidInput, OSError) as error:
        print(f"{given.out}: {why_not(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1
    return int(bad > 0)


def _put(rows: Sequence[dict[str, Any]], out: str | None) -> None:
    if out is None:
        write(rows, sys.stdout)
        return
    import io

    text = io.StringIO()
    write(rows, text)
    with written_whole(as_path(out)) as file:
        file.write(text.getvalue().encode())


def _harmless(value: Any) -> Any:
    """Return what a spreadsheet shows as it is: students choose their answers and the names of files."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
