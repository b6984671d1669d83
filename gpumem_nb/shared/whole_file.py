"""Files that are written whole or not at all, and why one cannot be written, in words."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

Ours = bytes | Callable[[IO[bytes]], bool]
"""How a file begins that may be replaced, or what tells it from other files."""
_WHY_NOT = {
    errno.ENOSPC: "the disk is full. Free some room there, or name a file on another disk",
    errno.EDQUOT: "your disk quota is used up. Free some room there, or name a file on another disk",
    errno.EFBIG: "the file would be larger than this process may write. Raise ulimit -f, or name another disk",
    errno.ENOENT: "there is no such folder. Make it first, or name another",
    errno.ENOTDIR: "there is no such folder. Make it first, or name another",
    errno.EISDIR: "this is a folder. Name a file in it",
    errno.EACCES: "you may not write there. Name a file in a folder of your own",
    errno.EPERM: "you may not write there. Name a file in a folder of your own",
    errno.EROFS: "nothing can be written to that disk. Name a file on another one",
}


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Give a stream whose content becomes the file if the block succeeds; until then an older file stays.

    The new file has the mode of the older one. Where ``path`` is a symbolic link, the file that it leads to is written.
    The folder must be there. Raises ``OSError`` where it cannot be written.
    """
    path = Path(os.path.realpath(path))
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()
    with suppress(OSError):  # the name itself survives a power cut only when its folder is synchronised too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def why_kept(path: Path, ours: Ours, what: str) -> str:
    """Say why a file stays: it exists, and is neither empty nor ``what``. Empty where it may be replaced.

    A slip of the finger must not cost a notebook. Raises ``OSError`` for what cannot be read, or is a folder.
    """
    if not path.exists():
        return ""
    check_no_folder(path)
    with open(path, "rb") as file:
        known = ours(file) if callable(ours) else file.read(len(ours)) == ours
        replaceable = known or not os.fstat(file.fileno()).st_size
    return "" if replaceable else f"{path} already exists and is not {what}. Choose another file name."


def check_no_folder(path: Path) -> None:
    """Raise ``OSError`` for a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def why_not(error: OSError) -> str:
    """Return why a file could not be written, and what to do."""
    known = _WHY_NOT.get(error.errno or 0)
    return known or f"{error.strerror or error}. Name another file"
