"""The interface of a launcher of ranks, and the shared parts: controller, client, record, the end."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import math
import signal
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from ...shared import cluster_records
from ...shared.answers import Progress
from ...shared.errors import StartError
from ...shared.messages import RankInfo
from ...shared.processes import STOPPED, Identity, identify
from ..hosts.connection import RemoteHosts, RemoteRank
from ..resources import Host
from . import ipyparallel_cluster

GRACE_S = 1.0
"""Between asking processes to end and ending them."""
SHARED_MEMORY = Path("/dev/shm")
_numbers = itertools.count(1)

_PHASES = ("controller", "engines", "horovod")
_LABELS = {
    "controller": "starting the controller",
    "engines": "starting the ranks",
    "horovod": "joining the ranks with Horovod",
}


@dataclass(frozen=True)
class Job:
    """The ranks that a launcher must start.

    Attributes:
        size: number of ranks.
        threads: CPU threads of each.
        device: ``cuda`` or ``cpu``.
        memory_limit: of each rank in bytes, for other notebooks to know.
        hosts: where the ranks run, this machine first; empty when all run on it.
        start_up: code that each rank runs first.
    """

    size: int
    threads: int
    device: str
    memory_limit: int | None
    hosts: tuple[Host, ...]
    start_up: str


class Launcher(ABC):
    """A running cluster: one controller and the ranks, each an engine whose id is its MPI and Horovod rank.

    A launcher says how the ranks are started (:attr:`engine_set`, :attr:`starter_name`, :meth:`settings`) and how one
    ended (:meth:`verdict`, :meth:`left_host`, :meth:`own_lines`); the rest is the same for all. It is listed in
    :data:`gpumem_nb.cluster.launchers.LAUNCHERS`.

    Args:
        job: what to start.

    Attributes:
        engine_set: ipyparallel's name for what starts its engines.
        starter_name: what the process is called that starts the ranks and ends with them.
        client: connected ipyparallel client, once started.
        seconds: how long each phase of the start took.
        controller, starter: who they are, once they were started.
        remote_hosts: the other hosts.
        profile: folder of connection files and logs, readable by its owner only.

    Raises:
        SetupError: a program that it needs is missing.
        StartError: no folder can be made, or nothing be written to the user's cache.
    """

    engine_set: ClassVar[str]
    starter_name: ClassVar[str]

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seconds: dict[str, float] = {}
        self.folders = _make_folders()
        self.profile = self.folders[0]
        kernel = cluster_records.this_process()
        self._record = cluster_records.Record(
            machine=cluster_records.machine(),
            kernel=kernel,
            processes=(),
            folders=tuple(map(str, self.folders)),
            ranks=job.size,
            device=job.device,
            memory_limit=job.memory_limit,
        )
        self._record_path = cluster_records.records_dir() / f"{kernel.pid}-{kernel.started}-{next(_numbers)}.json"
        self._ending = threading.Lock()
        self._ended = False
        self.client: Any = None
        self.controller: Identity | None = None
        self.starter: Identity | None = None
        opening = {
            "folders": self._record.folders,
            "ranks": job.size,
            "device": job.device,
            "memory_limit": job.memory_limit,
        }
        self.remote_hosts = RemoteHosts(job.hosts, self.profile, opening)
        self._cluster = ipyparallel_cluster.make(job.size, self.engine_set, self.profile)
        try:
            self._record.write(self._record_path)
        except OSError as error:
            self._record.end()
            raise StartError(
                f"The record of the ranks could not be written ({error}). Free some disk, or set XDG_CACHE_HOME to a "
                "folder with room, and start again."
            ) from None
        atexit.register(self.stop)

    @abstractmethod
    def settings(self, engine_arguments: list[str]) -> dict[str, dict[str, Any]]:
        """Return ipyparallel's settings by class, with which :attr:`engine_set` starts the ranks."""

    @abstractmethod
    def verdict(self) -> tuple[int, int] | None:
        """Return the rank that ended first and its exit code (negative for a signal); ``None`` before that is known."""

    @abstractmethod
    def left_host(self) -> str:
        """Return the host on which a rank ended, when that is all that is known; empty when it is not."""

    def hosts_that_gave_up(self) -> set[str]:
        """Hosts with ranks that ended because they lost a connection; empty where that is not told."""
        return set()

    @abstractmethod
    def own_lines(self) -> str:
        """:meth:`log` without the lines that tell least, when there are others."""

    def start(self, deadline: float, progress: Progress) -> None:
        """Start controller and ranks and connect; ``deadline`` is on the clock of ``time.monotonic``.

        Raises:
            StartError: a host cannot be used, a process ended, or time was up.
        """
        with self.phase("controller", progress):
            self.remote_hosts.open(deadline)
            self.record_all()
            # ipyparallel's own waits within a start are shorter: a busy machine may take longer.
            left_s = max(1, math.ceil(deadline - time.monotonic()))
            arguments = self.remote_hosts.controller_arguments()
            self.controller = ipyparallel_cluster.start_controller(self._cluster, left_s, arguments)
            self.record_all()
        with self.phase("engines", progress):
            arguments = ipyparallel_cluster.engine_arguments(left_s, self.job.start_up)
            self.starter = ipyparallel_cluster.start_engines(self._cluster, self.job.size, self.settings(arguments))
            self.remote_hosts.hand_over(ipyparallel_cluster.connection_file(self._cluster))
            self.record_all()
            self.client = self._cluster.connect_client_sync(timeout=left_s)
            self._await_engines(deadline, progress)
            self.record_all()
            for path in (self.profile / "security").iterdir():
                path.chmod(0o600)

    @property
    def processes(self) -> tuple[Identity, ...]:
        """Every process recorded so far."""
        return self._record.processes

    @property
    def essential(self) -> dict[Identity, str]:
        """Processes that the cluster cannot do without, the ranks themselves aside, and what they are."""
        schedulers = dict.fromkeys(_family(self.controller), "The controller")
        return schedulers | ({self.starter: f"The launcher {self.starter_name}"} if self.starter else {})

    def exit_code(self, who: Identity) -> int | None:
        """Return how controller or starter ended, negative for a signal; ``None`` while it runs or if not known."""
        return ipyparallel_cluster.exit_code(self._cluster, who.pid)

    def stop(self, timeout_s: float = GRACE_S) -> None:
        """End all processes, wait until they are gone, and remove every trace; a second time to no effect.

        With patience they are asked first; who does not end in time, or cannot because it is stopped, is killed.
        """
        while not self._ended:
            if self._ending.acquire(blocking=False):  # says which thread does it; no thread waits for the lock itself
                try:
                    self._end(timeout_s)
                finally:
                    self._ending.release()
            else:
                time.sleep(0.02)

    def _end(self, timeout_s: float) -> None:
        with suppress(OSError):  # of a full disk
            self.record_all()
        if self.client is not None:
            self.client.close(linger=0)
        self.remote_hosts.dismiss()
        if timeout_s and not any(who.state == STOPPED for who in self.processes):
            for who in (self.starter, self.controller):
                if who:
                    who.signal(signal.SIGTERM)
            cluster_records.await_end(self.processes, timeout_s)
        self.remote_hosts.close()
        self._record.end()
        with suppress(OSError):  # of a disk that nothing can be written to any more
            self._record_path.unlink(missing_ok=True)
        atexit.unregister(self.stop)
        self._ended = True

    def record_all(self) -> None:
        """Take note of every process that belongs to the cluster right now."""
        family = {*_family(self.controller), *_family(self.starter), *self.remote_hosts.connections}
        if new := family - set(self._record.processes):
            known = tuple(who for who in self._record.processes if who.runs)
            self._record = dataclasses.replace(self._record, processes=(*known, *new))
            self._record.write(self._record_path)

    def log(self) -> str:
        """Return what the starter and the ranks wrote themselves."""
        text = ""
        with suppress(OSError):  # ipyparallel takes the file away when the starter has ended, and keeps what was in it
            text = "".join(log.read_text(errors="replace") for log in self.profile.glob("log/ipengine*"))
        return text or ipyparallel_cluster.output(self._cluster)

    def fault(self, pid: int) -> str:
        """Return what Python left of a rank's crash."""
        file = cluster_records.fault_file(self.profile, pid)
        return file.read_text(errors="replace") if file.exists() else ""

    def log_tail(self, lines: int = 4) -> str:
        """Return the last words: so many lines of :meth:`own_lines`."""
        return "\n".join([line for line in self.own_lines().splitlines() if line.strip()][-lines:])

    def identify_rank(self, info: RankInfo) -> Identity | RemoteRank:
        """Return who a rank is; raises ``StartError`` when it has ended already."""
        who = self.remote_hosts.rank(info.machine, info.pid) or identify(info.pid)
        if who is None:
            raise StartError(f"Rank {info.rank} (pid {info.pid}) ended while it was starting. {self.log_tail()}")
        return who

    def check_up(self) -> None:
        """Raise ``StartError`` when a process or a host that the start needs has ended or is lost."""
        for what, who in ((self.starter_name, self.starter), ("The controller", self.controller)):
            if who is None or not who.runs:
                raise StartError(f"{what} ended before all ranks were up. It said: {self.log_tail()}")
        for host in self.remote_hosts.hosts:
            if host.lost:
                raise StartError(f"Host {host.name} {host.lost}")

    @contextmanager
    def phase(self, name: str, progress: Progress) -> Iterator[None]:
        """Time a phase of the start."""
        progress(_LABELS[name], _PHASES.index(name) / len(_PHASES))
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began

    def _await_engines(self, deadline: float, progress: Progress) -> None:
        size = self.job.size
        while len(self.client.ids) < size:
            up = len(self.client.ids)
            progress(f"{up} of {size} ranks are up", (1 + up / size) / len(_PHASES))
            self.check_up()
            if time.monotonic() > deadline:
                raise StartError(
                    f"Only {up} of {size} ranks were up in time. Give them longer with --timeout, or start fewer. "
                    f"{self.log_tail()}"
                )
            time.sleep(0.02)


def _make_folders() -> tuple[Path, ...]:
    """Return the cluster's own, and one for memory that its ranks share: in memory, where there is a place for that."""
    try:
        profile = Path(tempfile.mkdtemp(prefix=cluster_records.FOLDER_PREFIX))
    except OSError as error:
        raise StartError(
            f"No folder for connection files could be made ({error}). Free some disk, or set TMPDIR to a folder "
            "that you can write to, and start again."
        ) from None
    shared = SHARED_MEMORY / profile.name
    try:
        shared.mkdir(mode=0o700)
    except OSError:
        return (profile,)
    return (profile, shared)


def _family(top: Identity | None) -> tuple[Identity, ...]:
    """Return a process, while it runs, and everything below it."""
    if top is None or not top.runs:
        return ()
    with suppress(psutil.NoSuchProcess):
        below = [identify(child.pid) for child in psutil.Process(top.pid).children(recursive=True)]
        return (top, *(who for who in below if who))
    return ()
