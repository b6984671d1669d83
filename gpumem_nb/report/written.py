"""A file for other people that was written, in words."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from ..shared.errors import InvalidInput
from ..shared.units import format_bytes
from ..shared.whole_file import check_no_folder, why_not, written_whole


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written: where, how large, and what it holds, in a sentence."""

    path: Path
    size_bytes: int
    holds: str

    def __str__(self) -> str:
        return f"Written: {self.path} ({format_bytes(self.size_bytes)}). {self.holds}"

    __repr__ = __str__


def check_over(target: Path, begin: bytes) -> None:
    """Refuse to replace anything but a file that begins like this, before any work is done for it.

    Raises:
        InvalidInput: something else has that name, or it cannot be told.
    """
    try:
        check_no_folder(target)
        if not target.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not os.access(target.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if target.exists() and not _begins(target, begin):
            raise InvalidInput(f"{target} is there already and is of something else. Name another file.")
    except OSError as error:
        raise InvalidInput(f"{target} cannot be written: {why_not(error)}.") from None


def write_over(target: Path, data: bytes, begin: bytes, holds: str) -> Written:
    """Write a whole file, in place of nothing but one that begins like this.

    Raises:
        InvalidInput: it cannot be written, or something else has that name.
    """
    check_over(target, begin)
    try:
        with written_whole(target) as file:
            file.write(data)
    except OSError as error:
        raise InvalidInput(f"{target} cannot be written: {why_not(error)}.") from None
    return Written(target, len(data), holds)


def _begins(path: Path, begin: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(begin)) in (begin, b"")
