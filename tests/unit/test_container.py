"""Cores and memory are those of the container, where there is one."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from gpumem_nb.engine.device_look import rank_info
from gpumem_nb.shared import processes

MIB = 2**20


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores and 8 GiB."""
    monkeypatch.setattr(processes, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(processes, "OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 8192 * MIB}))
    return tmp_path / "cgroup"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_without_a_container_they_are_the_machines(root: Path) -> None:
    assert (processes.cores(), processes.available_bytes()) == (8, 8192 * MIB)


def test_the_tightest_group_around_counts(root: Path) -> None:
    processes.OWN.write_text("0::/pod/box\n")
    write(root / "pod" / "box", cpu__max="max 100000\n", memory__max=f"{2048 * MIB}\n", memory__current=f"{500 * MIB}")
    write(root / "pod" / "box", memory__stat=f"anon 5\ninactive_file {100 * MIB}\n")
    write(root / "pod", cpu__max="250000 100000\n", memory__max="max\n", memory__current="7")
    write(root, cpu__max="400000 100000\n")
    assert (processes.cores(), processes.available_bytes()) == (2, 1648 * MIB)


def test_half_a_core_is_one_and_more_memory_than_allowed_is_none_left(root: Path) -> None:
    processes.OWN.write_text("0::/\n")
    write(root, cpu__max="50000 100000\n", memory__max=f"{MIB}\n", memory__current=f"{2 * MIB}")
    assert (processes.cores(), processes.available_bytes()) == (1, 0)


def test_the_first_version_has_a_folder_for_each_controller(root: Path) -> None:
    processes.OWN.write_text("5:cpu,cpuacct:/box\n4:memory:/box\n0::/\n")
    write(root / "cpu,cpuacct" / "box", cpu__cfs_quota_us="300000\n", cpu__cfs_period_us="100000\n")
    write(root / "cpu,cpuacct", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    usage = {"memory__limit_in_bytes": f"{1024 * MIB}\n", "memory__usage_in_bytes": f"{24 * MIB}\n"}
    write(root / "memory" / "box", **usage)
    assert (processes.cores(), processes.available_bytes()) == (3, 1000 * MIB)


def test_ranks_share_as_many_cores_as_the_container_may_use(root: Path) -> None:
    """Else waiting for a core is blamed on other programs, and more ranks are forecast to be faster."""
    processes.OWN.write_text("0::/\n")
    assert rank_info(Mock()).cores == tuple(range(8))
    write(root, cpu__max="200000 100000\n")
    assert rank_info(Mock()).cores == (0, 1)
