"""A file is written whole or not at all, and what it was stays: a link, its mode."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from gpumem_nb.shared.state_file import why_kept, written_whole


def write(path: Path, text: bytes) -> None:
    with written_whole(path) as file:
        file.write(text)


def test_what_fails_half_way_leaves_the_older_file_alone(tmp_path: Path) -> None:
    write(tmp_path / "a", b"older")
    with suppress(KeyError), written_whole(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyError
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"older")]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o755, 0o444])
def test_a_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a"
    write(path, b"older")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask(), "a new one has the usual mode"
    path.chmod(mode)
    write(path, b"newer")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"newer", mode)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one_and_the_file_that_it_leads_to_is_written(tmp_path: Path, there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    real = tmp_path / "elsewhere" / "real"
    if there:
        real.write_bytes(b"older")
    (tmp_path / "second").symlink_to(real)
    (tmp_path / "first").symlink_to("second")
    write(tmp_path / "first", b"newer")
    assert real.read_bytes() == b"newer"
    assert (tmp_path / "first").is_symlink()
    assert (tmp_path / "second").is_symlink()
    assert os.listdir(tmp_path / "elsewhere") == ["real"]


def test_a_device_is_no_empty_file_that_may_be_replaced(tmp_path: Path) -> None:
    assert "Choose another file name" in why_kept(Path(os.devnull), b"ours", "a script")
    (tmp_path / "empty").touch()
    assert why_kept(tmp_path / "empty", b"ours", "a script") == ""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
