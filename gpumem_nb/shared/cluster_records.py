"""A record of every cluster on disk, so that another kernel can end exactly its processes if it is orphaned."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import platformdirs
import psutil

from .processes import Identity, identify, marked
from .units import format_bytes

FOLDER_PREFIX = "gpumem_nb-ranks-"
TIMEOUT_S = 2.0
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Record:
    """One cluster: its kernel, its processes, the folders that go with it, and what other kernels may know of it.

    ``machine`` names the boot and the container that the pids belong to; the first of ``folders`` has a name of its
    own, which every process of the cluster carries in its environment. ``memory_limit`` of each rank in bytes.
    """

    machine: str
    kernel: Identity
    processes: tuple[Identity, ...]
    folders: tuple[str, ...]
    ranks: int
    device: str
    memory_limit: int | None

    def write(self, path: Path) -> None:
        """Write it in one piece, readable by its owner only."""
        draft = path.with_name(path.name + ".new")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(dataclasses.asdict(self), file)
        draft.replace(path)

    def end(self, sparing: Collection[int] = ()) -> None:
        """End what still runs, except processes with these pids, and remove the folders."""
        mark = Path(self.folders[0]).name
        end([who for who in {*self.processes, *marked(mark)} if who.pid not in sparing])
        for folder in self.folders:
            if _ours(Path(folder)):
                shutil.rmtree(folder, ignore_errors=True)

    def host_memory(self) -> int:
        """Bytes of this machine's memory that would be free without its processes; what cannot be read is left out."""
        return sum(map(_own_memory, self.processes))

    def __str__(self) -> str:
        kind = "virtual GPUs" if self.device == "cpu" else "GPUs"
        limit = "" if self.memory_limit is None else f" of {format_bytes(self.memory_limit)} each"
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        held = f"they hold {format_bytes(self.host_memory())} of this machine's memory"
        return f"kernel {self.kernel.pid} has {ranks} ({kind}{limit}); {held}"


def end(processes: Iterable[Identity], timeout_s: float = TIMEOUT_S) -> bool:
    """Kill these processes, wait until they are gone, and return whether they are. SIGKILL ends stopped ones too."""
    left = [who for who in processes if who.signal(signal.SIGKILL)]
    return await_end(left, timeout_s)


def await_end(processes: Iterable[Identity], timeout_s: float) -> bool:
    """Wait until these processes are gone, and return whether they are."""
    left = list(processes)
    deadline = time.monotonic() + timeout_s
    while left := [who for who in left if who.runs]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def machine() -> str:
    """Return the boot and the container that pids belong to here: a home folder may be shared with others."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def read(path: Path) -> Record | None:
    """Return what a file says; ``None`` for anything but a whole record that this user wrote."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            return None
        said = json.loads(path.read_text())
        record = Record(
            machine=_is(said["machine"], str),
            kernel=_identity(said["kernel"]),
            processes=tuple(_identity(who) for who in said["processes"]),
            folders=tuple(_is(folder, str) for folder in said["folders"]),
            ranks=_is(said["ranks"], int),
            device=_is(said["device"], str),
            memory_limit=None if said["memory_limit"] is None else _is(said["memory_limit"], int),
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    named = [Path(folder) for folder in record.folders]
    whole = bool(named) and all(folder.is_absolute() and folder.name.startswith(FOLDER_PREFIX) for folder in named)
    return record if whole else None


def records_dir() -> Path:
    """Return the folder of this user's records, made when it is not there; the temporary one where that cannot be."""
    folder = platformdirs.user_cache_path("gpumem_nb") / "sessions"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.gettempdir())


def find(folder: Path) -> tuple[Path, Record] | None:
    """Return the record of the cluster to which this folder belongs on this machine, and where it lies."""
    return next(((path, record) for path, record in _here() if record.folders[0] == str(folder)), None)


def fault_file(profile: Path, pid: int) -> Path:
    """Return where Python leaves the lines at which an engine crashed: its own output may be lost on the way."""
    return profile / "log" / f"fault-{pid}.txt"


def others() -> list[Record]:
    """Return the other clusters of this user that live on this machine."""
    return [record for _, record in _here() if record.kernel.runs and record.kernel.pid != os.getpid()]


def clean_up_after_others() -> list[Record]:
    """End the orphaned clusters of kernels that are gone, and return them."""
    return [record for path, record in _here() if not record.kernel.runs and claim_and_end(path)]


def claim_and_end(path: Path, sparing: Collection[int] = ()) -> Record | None:
    """End an orphaned cluster and return it, unless another process is ending it or has ended it."""
    try:
        file = open(path)  # noqa: SIM115 - closed below, which gives the lock back
    except OSError:
        return None
    with file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        record = read(path)
        if record and not record.kernel.runs:
            record.end(sparing)
            path.unlink(missing_ok=True)
            return record
    return None


def _here() -> Iterator[tuple[Path, Record]]:
    for path in sorted(records_dir().glob("*.json")):
        record = read(path)
        if record and record.machine == machine():
            yield path, record


def _own_memory(who: Identity) -> int:
    """Return the process's private memory in bytes, without libraries that all ranks map."""
    with suppress(psutil.Error):
        if who.runs:
            return int(psutil.Process(who.pid).memory_full_info().uss)
    return 0


def _ours(folder: Path) -> bool:
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()


def _identity(said: object) -> Identity:
    if not isinstance(said, list) or len(said) != 2:
        raise TypeError(said)
    who = Identity(_is(said[0], int), _is(said[1], int))
    if who.pid <= 1:
        raise ValueError(who)
    return who


def _is(value: object, kind: type[Kind]) -> Kind:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(value)
    return value


def this_process() -> Identity:
    """Return the kernel, which is always there."""
    who = identify(os.getpid())
    assert who
    return who


if __name__ == "__main__":
    sys.exit(claim_and_end(Path(sys.argv[1]), sparing=(os.getpid(), os.getppid())) is None)
