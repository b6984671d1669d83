"""Automatic snapshots on rank 0: copied while training waits, written while it goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ...memory.device import Device
from ...shared import snapshot_folder
from ...shared.errors import StateFileError
from ...shared.messages import SnapshotOrder, Stored
from ...shared.units import format_bytes
from ..link.collectives import give_way
from ..link.communicator import here
from ..step.trainer import Trainer
from . import capture


class Snapshots:
    """Takes snapshots and writes them, one at a time, on a thread that gives way to training."""

    def __init__(self) -> None:
        self._writing: threading.Thread | None = None
        self._stored: Stored | None = None

    def take(self, trainer: Trainer, device: Device, order: SnapshotOrder) -> float:
        """Copy the state and start writing it; all ranks call it together. Returns the seconds it held training up.

        None is taken while an earlier one is still being written.
        """
        began = time.perf_counter()
        path = str(Path(order.folder) / snapshot_folder.file_name(order.generation, trainer.steps))
        captured = None
        try:
            here().check()
            captured = capture.capture(trainer, device, order.options)
        except StateFileError as error:
            self._stored = Stored(path, trainer.steps, 0, 0.0, f"No snapshot was taken. {error}")
        except Exception as error:
            if not here().is_separation(error):  # after which the ranks join again before anything else
                raise
            self._stored = Stored(path, trainer.steps, 0, 0.0, taken=False)
        if captured and self._writing and self._writing.is_alive():  # given up by the kernel: the disk may hang
            self._stored = Stored(path, trainer.steps, 0, 0.0, taken=False)
        elif captured:
            self._writing = threading.Thread(target=self._write, args=(captured, order), daemon=True)
            self._writing.start()
        return time.perf_counter() - began

    def take_and_wait(self, trainer: Trainer, device: Device, order: SnapshotOrder) -> Stored | None:
        """Return the same, and wait until it is written, after one whose writing is under way."""
        self._wait()
        self.take(trainer, device, order)
        self._wait()
        return self.stored()

    def _wait(self) -> None:
        if self._writing:
            self._writing.join()

    def stored(self) -> Stored | None:
        """Return the snapshot whose writing has ended since the last question."""
        stored, self._stored = self._stored, None
        return stored

    def _write(self, captured: capture.Captured, order: SnapshotOrder) -> None:
        give_way()
        folder, steps = Path(order.folder), captured.header.steps
        path = folder / snapshot_folder.file_name(order.generation, steps)
        nbytes, problem = captured.nbytes, ""
        try:
            if snapshot_folder.make_room(folder, nbytes, order.space_bytes):
                nbytes = captured.write(path)
            else:
                problem = (
                    f"No snapshot was kept: it takes {format_bytes(nbytes)}, more than is left of the "
                    f"{format_bytes(order.space_bytes)} for snapshots. Give them more with "
                    "%hvd_set snapshot_space=8GiB."
                )
        except Exception as error:  # the kernel waits for an answer, whatever went wrong
            problem = f"No snapshot was kept: {error}"
        self._stored = Stored(str(path), steps, nbytes, time.thread_time(), problem)
