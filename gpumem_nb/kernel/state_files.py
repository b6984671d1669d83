"""Files of training state: saved, resumed from, and the automatic snapshots that there are."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from ..cluster import resources
from ..report.runs.files import ImportedRuns, packed, unpacked
from ..report.written import SnapshotRow, Snapshots, StateFile
from ..shared import snapshot_folder, state_file
from ..shared.answers import Progress
from ..shared.errors import StateFileError
from ..shared.state_file import as_path
from ..workloads import catalog
from .cluster import AsksRanks, Cluster
from .loading import Loading
from .snapshot_plan import notebook_name


class StateFiles(AsksRanks):
    """Saves and resumes what the ranks of one cluster train."""

    def __init__(self, cluster: Cluster, loading: Loading) -> None:
        super().__init__(cluster)
        self._loading = loading

    def save(self, path: str | os.PathLike[str], progress: Progress) -> StateFile:
        """Write the training state between two chunks to a file."""
        target = as_path(path)
        began = time.perf_counter()
        progress("writing the training state", 0.5)
        with self._foreground.interruptible():
            self._training.requests.settle()
        stored = self._foreground.call_alone("save", str(target), self._origin.options, packed(self._record.rows()))[0]
        return StateFile("saved", target, stored.size_bytes, stored.steps, time.perf_counter() - began)

    def resume(self, path: str | os.PathLike[str] | None, progress: Progress) -> StateFile:
        """Go on from a file, or from the newest automatic snapshot of this notebook."""
        began = time.perf_counter()
        source = newest(self._snapshots.folder) if path is None else as_path(path)
        progress("reading the training state", 0.5)
        if self._training.workload is None:
            header = ready_made(source)
            self._loading.load(header.workload, header.options or {}, header.seed)
        size = 0
        with suppress(OSError):  # the ranks say in a sentence why they cannot read it
            size = source.stat().st_size
        header = self._loading.resume_from(source)
        return StateFile("resumed", source, size, header.steps, time.perf_counter() - began)

    def load_runs(self, path: str | os.PathLike[str]) -> ImportedRuns:
        """Take in the runs that a state holds, and nothing else of it.

        Raises:
            InvalidInput: not a path.
            StateFileError: it is not such a file, or holds none.
        """
        source = as_path(path)
        (runs,) = self._foreground.call("runs_in", str(source), ranks=[0])
        if not runs:
            raise StateFileError(f"{source} holds no runs: it is an automatic snapshot, or of an earlier gpumem_nb.")
        try:
            rows, unread = unpacked(runs)
        except StateFileError as error:
            raise StateFileError(f"{source}: {error}") from None
        return ImportedRuns(source, self._record.bring(rows, source.name), unread)


def snapshots(folder: Path) -> Snapshots:
    """Return the automatic snapshots for the session that has this folder; unreadable ones are left out."""
    rows = []
    for found in snapshot_folder.of_all_sessions(folder, notebook_name()):
        try:
            header = state_file.peek(found.path)
        except StateFileError:
            continue
        notebook = snapshot_folder.notebook_of(found.path.parent)
        rows.append(
            SnapshotRow(
                found.path,
                header.workload,
                header.steps,
                header.ranks,
                header.created,
                found.own,
                notebook,
                found.over or found.own,
            )
        )
    return Snapshots(tuple(rows))


def newest(folder: Path) -> Path:
    """Return the newest snapshot of this notebook.

    Raises:
        StateFileError: there is none; names those of others.
    """
    found = snapshots(folder)
    if found.own:
        return found.own[0].path
    if not found.rows:
        raise StateFileError("There is no automatic snapshot. Name a file that %hvd_save wrote.")
    raise StateFileError(f"There is no automatic snapshot of this notebook, but of others:\n{found}")


def ready_made(source: Path) -> state_file.Header:
    """Return what a file is of, which can be loaded without more.

    Raises:
        StateFileError: the file cannot be used, or is of something else than a ready-made workload.
    """
    header = state_file.verify(source)
    if header.options is None or header.workload not in catalog.CATALOG:
        raise StateFileError(
            f"{source} is of {header.workload}, which is not a ready-made workload. Load or attach it first, then "
            f"resume: %hvd_resume {source}"
        )
    return header


def ranks_for(path: str | os.PathLike[str] | None) -> tuple[Path, int | None, int | None]:
    """Return the file to resume from without a session, the ranks it had and their limit; on GPUs one rank for each."""
    source = newest(snapshot_folder.for_session(0)) if path is None else as_path(path)
    header = ready_made(source)
    if resources.visible_gpus():
        return source, None, None
    return source, min(header.ranks, resources.most_ranks()), header.virtual_limit
