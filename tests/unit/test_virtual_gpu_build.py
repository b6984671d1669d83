"""Building the virtual GPU's library: once for all who want it, and a sentence where it cannot be built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_nb.memory.virtual_gpu import build
from gpumem_nb.shared.errors import SetupError


@pytest.fixture
def empty_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("empty_cache_folder")
@pytest.mark.full
def test_two_builds_at_once_leave_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho once >> {tmp_path}/compiled\nsleep 1\nwhile [ "$1" != -o ]; do shift; done\n> "$2"'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build.extension_path() is None
    command = [sys.executable, "-m", "gpumem_nb.memory.virtual_gpu.build"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    path = build.extension_path()
    assert path is not None
    assert all(line.startswith("virtual GPU: ") and str(path) in line and line.count("\n") == 1 for line in lines)
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".lock", ".so"]
    assert (tmp_path / "compiled").read_text() == "once\n"


@pytest.mark.usefixtures("empty_cache_folder")
@pytest.mark.parametrize(("compiler", "words"), [("no-such-c++", "not found: install"), ("false", "failed .*set CXX")])
def test_a_compiler_that_does_not_work_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, compiler: str, words: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(SetupError, match=f"{compiler.replace('+', '.')}.*{words}"):
        build.build()
    assert build.extension_path() is None


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SetupError, match=r"cannot be stored in .*XDG_CACHE_HOME"):
        build.build()


def test_the_library_links_no_python() -> None:
    text = build.build().read_bytes()
    assert b"libc10.so" in text
    assert b"libtorch_python" not in text
