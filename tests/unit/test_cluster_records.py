"""A record ends exactly the processes and folders that it names, once its kernel is gone, and nothing on any doubt."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.shared import cluster_records
from gpumem_nb.shared.cluster_records import Record
from gpumem_nb.shared.processes import Identity, identify


@pytest.fixture(autouse=True)
def own_records_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cluster_records.records_dir()


@pytest.fixture
def sleeper() -> Iterator[Callable[..., Identity]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: str = "") -> Identity:
        command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
        process = subprocess.Popen(command, env=os.environ | {"MARK": mark}, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout
        process.stdout.readline()
        who = identify(process.pid)
        assert who
        return who

    yield start
    for process in started:
        process.kill()
        process.communicate()


def gone() -> Identity:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    who = identify(process.pid)
    process.communicate()
    assert who
    return who


def record(kernel: Identity, *processes: Identity, **changes: Any) -> Record:
    folder = tempfile.mkdtemp(prefix=cluster_records.FOLDER_PREFIX)
    values: dict[str, Any] = {
        "machine": cluster_records.machine(),
        "kernel": kernel,
        "processes": processes,
        "folders": (folder,),
        "ranks": 2,
        "device": "cpu",
        "memory_limit": 2**31,
    }
    return Record(**(values | changes))


def test_what_a_dead_kernel_left_is_ended_and_removed(own_records_dir: Path, sleeper: Callable[..., Identity]) -> None:
    left, bystander = sleeper(), sleeper()
    orphaned = record(gone(), left)
    helper = sleeper(mark=orphaned.folders[0])
    path = own_records_dir / "1-1-1.json"
    orphaned.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert own_records_dir.stat().st_mode & 0o777 == 0o700
    assert cluster_records.clean_up_after_others() == [orphaned]
    assert not left.runs
    assert not helper.runs, "whatever the ranks had started themselves"
    assert bystander.runs
    assert not path.exists()
    assert not Path(orphaned.folders[0]).exists()
    assert cluster_records.clean_up_after_others() == []


def test_a_living_kernel_s_cluster_is_named_and_left_alone(
    own_records_dir: Path, sleeper: Callable[..., Identity]
) -> None:
    kernel, rank = sleeper(), sleeper()
    living = record(kernel, rank)
    living.write(own_records_dir / "2-2-2.json")
    assert cluster_records.clean_up_after_others() == []
    assert rank.runs
    [other] = cluster_records.others()
    held = other.host_memory()
    assert 100_000 < held < 100_000_000, "the rank's own pages, without what it shares with others"
    assert str(other).startswith(f"kernel {kernel.pid} has 2 ranks (virtual GPUs of 2.0 GiB each); they hold ")
    small = dataclasses.replace(other, memory_limit=64 * 2**20)
    assert "(virtual GPUs of 64.0 MiB each)" in str(small), "as in the lines above it in %hvd_status"
    assert re.search(r"they hold [\d.]+ [KM]iB of this machine's memory$", str(other))
    os.rmdir(living.folders[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.update(machine="another boot, another container"),
        lambda said: said.update(folders=["/home"]),
        lambda said: said.update(folders=[]),
        lambda said: said.update(folders=["gpumem_nb-ranks-relative"]),
        lambda said: said.update(processes=[[1, 2, 3]]),
        lambda said: said.update(processes=[["1", 2]]),
        lambda said: said.update(processes=[[0, 0]]),
        lambda said: said.update(kernel=None),
        lambda said: said.pop("processes"),
    ],
)
def test_a_foreign_or_malformed_record_is_never_acted_upon(
    change: Callable[[dict[str, Any]], object], own_records_dir: Path, sleeper: Callable[..., Identity]
) -> None:
    left = sleeper()
    path = own_records_dir / "3-3-3.json"
    orphaned = record(gone(), left)
    orphaned.write(path)
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))
    assert cluster_records.clean_up_after_others() == []
    assert cluster_records.others() == []
    assert left.runs
    os.rmdir(orphaned.folders[0])


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", '"text"', "[" * 100_000])
def test_a_file_that_is_no_record_is_ignored(text: str, own_records_dir: Path) -> None:
    (own_records_dir / "4-4-4.json").write_text(text)
    assert cluster_records.clean_up_after_others() == []


def test_a_pid_that_somebody_else_has_by_now_is_spared(own_records_dir: Path, sleeper: Callable[..., Identity]) -> None:
    stranger = sleeper()
    path = own_records_dir / "5-5-5.json"
    record(gone(), Identity(stranger.pid, stranger.started - 1)).write(path)
    assert len(cluster_records.clean_up_after_others()) == 1
    assert stranger.runs


def test_a_link_to_a_record_is_ignored(own_records_dir: Path, tmp_path: Path, sleeper: Callable[..., Identity]) -> None:
    left = sleeper()
    orphaned = record(gone(), left)
    orphaned.write(tmp_path / "elsewhere.json")
    (own_records_dir / "6-6-6.json").symlink_to(tmp_path / "elsewhere.json")
    assert cluster_records.clean_up_after_others() == []
    assert left.runs
    os.rmdir(orphaned.folders[0])
