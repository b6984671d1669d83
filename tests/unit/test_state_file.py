"""A file of training state is whole or not there, and what cannot be used is refused in a sentence."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from gpumem_nb.shared import state_file
from gpumem_nb.shared.errors import StateFileError
from gpumem_nb.shared.state_file import Header

HEADER = Header("digits-resnet", {"width": 8}, {"batch_size": 16}, 120, 3840, 2, 1500, "0.1.0", 1.0)


def write(path: Path, payload: bytes = b"state" * 1000) -> int:
    def put(stream: IO[bytes]) -> None:
        stream.write(payload)

    return state_file.write(path, HEADER, put)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.state"
    assert write(path) == path.stat().st_size
    return path


def test_what_was_written_is_read(good: Path) -> None:
    header, payload = state_file.read(good)
    assert header == HEADER == state_file.verify(good)
    assert payload.read() == b"state" * 1000


def test_a_file_from_before_seeds_is_read_as_of_seed_0(tmp_path: Path) -> None:
    header = {name: value for name, value in dataclasses.asdict(HEADER).items() if name != "seed"}
    content = b"gpumem_nb state 1\n" + json.dumps(header).encode() + b"\nstate"
    path = tmp_path / "old.state"
    path.write_bytes(content + b"\nend " + hashlib.sha256(content).hexdigest().encode() + b"\n")
    assert state_file.verify(path) == HEADER
    assert state_file.verify(path).seed == 0


def cut(path: Path, left: int) -> None:
    with path.open("r+b") as file:
        file.truncate(left)


def flip_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


REFUSALS: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda p: p.unlink(), "There is no file"),
    ("empty", lambda p: cut(p, 0), "is not a training state"),
    ("foreign", lambda p: p.write_bytes(b"PK\x03\x04" + bytes(1000)), "is not a training state"),
    ("newer", lambda p: p.write_bytes(p.read_bytes().replace(b"state 1\n", b"state 2\n", 1)), "written by a newer"),
    ("last byte gone", lambda p: cut(p, p.stat().st_size - 1), "is cut off"),
    ("half gone", lambda p: cut(p, p.stat().st_size // 2), "is cut off"),
    ("only the magic line", lambda p: cut(p, 18), "is cut off"),
    ("cut in the header", lambda p: cut(p, 60), "is cut off"),
    ("a bit of the payload", lambda p: flip_bit(p, p.stat().st_size - 500), "is damaged"),
    ("a bit of the header's values", lambda p: flip_bit(p, p.read_bytes().index(b"120")), "is damaged"),
    ("a bit of the header's form", lambda p: flip_bit(p, 18), "is damaged"),
    ("a bit of the hash", lambda p: flip_bit(p, p.stat().st_size - 5), "is damaged"),
    ("a folder", make_folder, "cannot be read"),
]


@pytest.mark.parametrize(("harm", "sentence"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS])
def test_a_file_that_cannot_be_used_is_refused(good: Path, harm: Callable[[Path], object], sentence: str) -> None:
    harm(good)
    with pytest.raises(StateFileError, match=sentence) as caught:
        state_file.read(good)
    assert str(good) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(StateFileError, match=sentence):
        state_file.verify(good)


def test_every_length_but_the_whole_is_refused(good: Path) -> None:
    whole = good.read_bytes()
    for left in range(0, len(whole), 97):
        good.write_bytes(whole[:left])
        with pytest.raises(StateFileError):
            state_file.read(good)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "cannot be written"),
    ],
)
def test_a_write_that_fails_leaves_the_older_file_and_nothing_else(good: Path, number: int, sentence: str) -> None:
    before = good.read_bytes()

    def fails_half_way(stream: IO[bytes]) -> None:
        stream.write(b"x" * 100_000)
        raise OSError(number, os.strerror(number))

    with pytest.raises(StateFileError, match=sentence):
        state_file.write(good, HEADER, fails_half_way)
    assert good.read_bytes() == before
    assert list(good.parent.iterdir()) == [good]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The operating system itself refuses more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_takes_no_more_leaves_the_older_file(good: Path) -> None:
    before = good.read_bytes()
    with largest_file(4096), pytest.raises(StateFileError, match="larger than this process may write"):
        write(good, bytes(100_000))
    assert good.read_bytes() == before
    assert list(good.parent.iterdir()) == [good]


def test_a_payload_that_raises_leaves_nothing(tmp_path: Path) -> None:
    def broken(stream: IO[bytes]) -> None:
        raise KeyError("state")

    with pytest.raises(KeyError):
        state_file.write(tmp_path / "new.state", HEADER, broken)
    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(StateFileError, match="there is no such folder"):
        write(tmp_path / "missing" / "x.state")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StateFileError, match="this is a folder"):
        write(tmp_path / "folder")
    with pytest.raises(StateFileError, match="cannot be written"):
        write(Path("/proc/x.state"))


def test_something_else_of_that_name_is_not_replaced(tmp_path: Path, good: Path) -> None:
    notebook = tmp_path / "lesson.ipynb"
    notebook.write_text("{}")
    with pytest.raises(StateFileError, match="already exists and is not a training state"):
        write(notebook)
    assert notebook.read_text() == "{}"
    write(good, b"newer")
    assert state_file.read(good)[1].read() == b"newer"
