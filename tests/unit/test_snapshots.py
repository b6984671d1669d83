"""Snapshots while an earlier one is still being written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_nb.engine.storing import capture
from gpumem_nb.engine.storing.snapshots import Snapshots
from gpumem_nb.shared import snapshot_folder
from gpumem_nb.shared.messages import SnapshotOrder, Stored


class Disk:
    """Hangs until it is let go; stands for a state that was captured."""

    def __init__(self) -> None:
        self.header = SimpleNamespace(steps=7)
        self.nbytes = 5
        self.free = threading.Event()

    def write(self, path: Path) -> int:
        self.free.wait()
        return self.nbytes


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(capture, "capture", lambda trainer, device, options: disk)
    monkeypatch.setattr("gpumem_nb.engine.storing.snapshots.give_way", lambda: None)
    yield disk
    disk.free.set()


def test_a_disk_that_hangs_does_not_stop_training(disk: Disk, tmp_path: Path) -> None:
    snapshots, order = Snapshots(), SnapshotOrder(str(tmp_path), 1, 2**20, None)
    trainer: Any = SimpleNamespace(steps=7)
    anything: Any = None
    path = str(tmp_path / snapshot_folder.file_name(1, 7))
    snapshots.take(trainer, anything, order)
    assert snapshots.stored() is None
    snapshots.take(trainer, anything, order)
    assert snapshots.stored() == Stored(path, 7, 0, 0.0, taken=False)
    disk.free.set()
    stored = snapshots.take_and_wait(trainer, anything, order)
    assert stored is not None
    assert (stored.path, stored.size_bytes, stored.taken) == (path, 5, True)
