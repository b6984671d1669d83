"""Files that are written whole or not at all, why one cannot be written in words, and files of training state.

A state's file has a header that the kernel reads, a payload that only ranks open, and a hash over both. Lines of text
come first, so that ``head -2`` shows what it is::

    gpumem_nb state 1
    {"workload": ..., "settings": {...}, "steps": ..., ...}
    <payload>
    end <sha256 of everything before this line>
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from .errors import InvalidInput, StateFileError

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
        about = os.fstat(file.fileno())
        replaceable = known or (stat.S_ISREG(about.st_mode) and not about.st_size)  # a device has no size either
    return "" if replaceable else f"{path} already exists and is not {what}. Choose another file name."


def check_no_folder(path: Path) -> None:
    """Raise ``OSError`` for a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def why_not(error: OSError) -> str:
    """Return why a file could not be written, and what to do."""
    known = _WHY_NOT.get(error.errno or 0)
    return known or f"{error.strerror or error}. Name another file"


Answer = TypeVar("Answer")

FORMAT = 1
_MAGIC = b"gpumem_nb state "
_LONGEST_LINE = 2**20
_TRAILER_BYTES = len(b"\nend ") + 64 + 1
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Header:
    """The training that a state belongs to.

    Attributes:
        workload, options: what was trained; ``options`` are those of a ready-made workload, ``None`` for any other.
        settings: the knobs by name.
        steps, position: optimizer steps done, and places of the data stream consumed by all ranks together.
        ranks: how many there were.
        dataset_len: number of samples in an epoch; ``None`` where it is not known.
        version: of the toolkit that wrote it.
        created: seconds since the epoch.
        passes, pass_began: of data that can only be iterated, the passes that were over, and the position at which the
            one under way began.
        seed: of the data's order; files without one were written when it was always 0.
        virtual_limit: bytes that each rank could use of its virtual GPU; ``None`` on GPUs and in older files.
    """

    workload: str
    options: dict[str, Any] | None
    settings: dict[str, Any]
    steps: int
    position: int
    ranks: int
    dataset_len: int | None
    version: str
    created: float = field(default_factory=time.time)
    passes: int = 0
    pass_began: int = 0
    seed: int = 0
    virtual_limit: int | None = None


class _Hashed(io.RawIOBase):
    """A file that is hashed while it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)


def write(path: Path, header: Header, payload: Callable[[IO[bytes]], None]) -> int:
    """Write a file whole or not at all; an older one under that name stays until the new one is safe on the disk.

    Args:
        path: where to; its folder must be there.
        header: what the state belongs to.
        payload: writes the state to the stream that it is given.

    Returns:
        The file's size in bytes.

    Raises:
        StateFileError: it cannot be written there, or something else has that name.
    """
    try:
        if kept := why_kept(path, _MAGIC, "a training state"):
            raise StateFileError(kept)
        with written_whole(path) as file:
            hashed = _Hashed(file)
            hashed.write(_MAGIC + f"{FORMAT}\n".encode() + json.dumps(dataclasses.asdict(header)).encode() + b"\n")
            payload(hashed)  # type: ignore[arg-type]
            file.write(b"\nend " + hashed.sha256.hexdigest().encode() + b"\n")
            size = file.tell()
    except OSError as error:
        raise StateFileError(f"{path} cannot be written: {why_not(error)}.") from None
    return size


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return what people type for a file; raises ``InvalidInput`` if it is not a path."""
    if not isinstance(path, str | os.PathLike) or not str(path).strip() or "\0" in str(path):
        raise InvalidInput(f"{path!r} is not a file's path. Give one such as digits.state.")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:  # the home of a user who is not known here
        home = str(path).split("/")[0]
        raise InvalidInput(f"{home} is not the folder of a user here. Write ~/ for your own.") from None


def peek(path: Path) -> Header:
    """Return what a file says that it is, without a look at the rest of it.

    Raises:
        StateFileError: as :func:`verify`, but for damage.
    """
    return _read(path, lambda file, header: header)


def verify(path: Path) -> Header:
    """Return the header of a file whose every byte is as it was written.

    Raises:
        StateFileError: not there, not readable, foreign, newer, cut off, or damaged.
    """
    return _read(path, _check_hash)


def read(path: Path) -> tuple[Header, io.BytesIO]:
    """Header and payload of a file, verified.

    Raises:
        StateFileError: as :func:`verify`.
    """

    def both(file: IO[bytes], header: Header) -> tuple[Header, io.BytesIO]:
        start = file.tell()
        _check_hash(file, header)
        end = file.seek(0, os.SEEK_END) - _TRAILER_BYTES
        file.seek(start)
        return header, io.BytesIO(file.read(end - start))

    return _read(path, both)


def _read(path: Path, use: Callable[[IO[bytes], Header], Answer]) -> Answer:
    try:
        with open(path, "rb") as file:
            return use(file, _header(path, file))
    except FileNotFoundError:
        raise StateFileError(f"There is no file {path}. Look for it with !ls, or save one with %hvd_save.") from None
    except OSError as error:
        raise StateFileError(f"{path} cannot be read ({error.strerror}). Name another file.") from None


def _header(path: Path, file: IO[bytes]) -> Header:
    """Reads from the beginning to where the payload starts."""
    first = file.readline(len(_MAGIC) + 16)
    if not first.startswith(_MAGIC):
        raise StateFileError(f"{path} is not a training state of gpumem_nb. Name a file that %hvd_save wrote.")
    number = first[len(_MAGIC) :].strip()
    if number.isdigit() and int(number) > FORMAT:
        raise StateFileError(
            f"{path} was written by a newer gpumem_nb (format {int(number)}, this one reads up to {FORMAT}). "
            "Update it: pip install -U gpumem_nb"
        )
    line = file.readline(_LONGEST_LINE)
    start = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(max(start, size - _TRAILER_BYTES))
    whole = file.read().startswith(b"\nend ") and size - start >= _TRAILER_BYTES
    file.seek(start)
    if not whole:
        raise StateFileError(f"{path} is cut off: its end is missing. Use an older file, or copy it again.")
    try:
        return Header(**json.loads(line))
    except (ValueError, TypeError):
        raise _damaged(file) from None


def _check_hash(file: IO[bytes], header: Header) -> Header:
    left = file.seek(0, os.SEEK_END) - _TRAILER_BYTES
    file.seek(0)
    sha256 = hashlib.sha256()
    while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
        sha256.update(block)
        left -= len(block)
    if file.read() != b"\nend " + sha256.hexdigest().encode() + b"\n":
        raise _damaged(file)
    return header


def _damaged(file: IO[bytes]) -> StateFileError:
    return StateFileError(f"{file.name} is damaged: its hash does not match. Use an older file, or copy it again.")
