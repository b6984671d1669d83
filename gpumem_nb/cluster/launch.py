"""Start an ipyparallel cluster of MPI engines and stop it again, leaving nothing behind."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import logging
import math
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
from traitlets.config import Config

from ..install.mpi_tools import LAUNCH_VARIABLES, require_tool
from ..shared import cluster_records
from ..shared.errors import StartError
from ..shared.messages import RankInfo
from ..shared.processes import STOPPED, Identity, identify
from ..shared.progress import Progress
from . import loopback
from .hosts import Host
from .remote import RemoteRank
from .remote_hosts import RemoteHosts

GRACE_S = 1.0
"""Between asking processes to end and ending them."""
SHARED_MEMORY = Path("/dev/shm")
_numbers = itertools.count(1)
_MPIEXEC = re.compile(r"^-{40,}$.*?^-{40,}$", re.MULTILINE | re.DOTALL)

_PHASES = ("controller", "engines", "horovod")
_LABELS = {
    "controller": "starting the controller",
    "engines": "starting the ranks",
    "horovod": "joining the ranks with Horovod",
}


class Launched:
    """A running cluster.

    Args:
        n: number of engines.
        variables: what they find in their environment.
        start_up: code that each runs first.
        device, memory_limit: for the record.
        hosts: where they run, if not all on this machine.

    Attributes:
        client: connected ipyparallel client; engine id = MPI rank = Horovod rank.
        seconds: how long each phase of the start took.
        controller, mpiexec: who they are, once they were started.
        elsewhere: the other hosts.
        profile: folder of connection files, logs and MPI's own files, readable by its owner only.
    """

    def __init__(
        self,
        n: int,
        variables: dict[str, str],
        start_up: str,
        device: str,
        memory_limit: int | None,
        hosts: Sequence[Host] = (),
    ) -> None:
        mpiexec = str(require_tool("mpiexec"))
        self.n = n
        self.seconds: dict[str, float] = {}
        self.folders = _make_folders()
        self.profile = self.folders[0]
        kernel = cluster_records.this_process()
        self._record = cluster_records.Record(
            machine=cluster_records.machine(),
            kernel=kernel,
            processes=(),
            folders=tuple(map(str, self.folders)),
            ranks=n,
            device=device,
            memory_limit=memory_limit,
        )
        self._record_path = cluster_records.records_dir() / f"{kernel.pid}-{kernel.started}-{next(_numbers)}.json"
        self._start_up = start_up
        self._ending = threading.Lock()
        self._ended = False
        self.client: Any = None
        self.controller: Identity | None = None
        self.mpiexec: Identity | None = None
        opening = {"folders": self._record.folders, "ranks": n, "device": device, "memory_limit": memory_limit}
        self.remote_hosts = RemoteHosts(hosts, self.profile, opening)
        self._variables = variables
        self._mpi_folders = {
            "OMPI_MCA_btl_sm_backing_directory": str(self.folders[-1]),
            "PRTE_MCA_prte_tmpdir_base": str(self.profile),
            "PMIX_MCA_pmix_server_tmpdir": str(self.profile),
        }
        self.cluster = ipyparallel.Cluster(
            n=n,
            engines="mpi",
            profile_dir=str(self.profile),
            delay=0,
            load_profile=False,
            shutdown_atexit=False,
            controller_args=[
                "--log-level=ERROR",
                "--HeartMonitor.period=300",
                "--HeartMonitor.max_heartmonitor_misses=100",
            ],
            config=Config({"MPILauncher": {"mpi_cmd": [mpiexec]}}),
            parent=None,
            log=_quiet_log(),
        )
        self._record.write(self._record_path)
        atexit.register(self.stop)

    def start(self, deadline: float, progress: Progress) -> None:
        """Start controller and engines and connect. ``deadline`` is on the clock of ``time.monotonic``."""
        with self.phase("controller", progress):
            self.remote_hosts.open(deadline)
            self.record_all()
            # ipyparallel's own waits within a start are shorter: a busy machine may take longer.
            left_s = max(1, math.ceil(deadline - time.monotonic()))
            self.cluster.controller_args = [
                *self.cluster.controller_args,
                f"--IPController.registration_timeout={left_s}",
                *self.remote_hosts.controller_arguments(),
            ]
            self.cluster.start_controller_sync()
            self.controller = identify(self.cluster.controller.pid)
            self.record_all()
        with self.phase("engines", progress):
            launcher = self.cluster.config.MPIEngineSetLauncher
            launcher.environment = self._variables | self._mpi_folders | self.remote_hosts.variables()
            launcher.mpi_args = self.remote_hosts.mpiexec_arguments([*self._variables])
            if not self.remote_hosts.hosts:
                launcher.environment |= loopback.variables()
                launcher.mpi_args += loopback.arguments()
            launcher.engine_args = [
                "--log-level=ERROR",
                # Signals go to the ranks themselves, and cluster/watch.py looks after them.
                "--IPEngine.enable_nanny=False",
                f"--IPEngine.wait_for_url_file={left_s}",
                f"--IPEngine.timeout={left_s}",
                f"--IPEngine.startup_command={self._start_up}",
            ]
            self.cluster.start_engines_sync(self.n)
            self.remote_hosts.hand_over(Path(self.cluster.controller.connection_files["engine"]))
            self.mpiexec = identify(self.cluster.engine_set.pid)
            self.record_all()
            self.client = self.cluster.connect_client_sync(timeout=left_s)
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
        return schedulers | ({self.mpiexec: "The launcher mpiexec"} if self.mpiexec else {})

    def exit_code(self, who: Identity) -> int | None:
        """How controller or mpiexec ended, negative for a signal; ``None`` while it runs or when nobody can tell."""
        code = None
        for launcher in (self.cluster.controller, self.cluster.engine_set):
            if launcher is not None and launcher.pid == who.pid:
                with suppress(psutil.Error):
                    code = launcher.process.wait(0)
        return code if code is None else int(code)

    def stop(self, patience_s: float = GRACE_S) -> None:
        """End all processes, wait until they are gone, and remove every trace.

        With patience they are asked first; who does not end in time, or cannot because it is stopped, is killed.
        """
        with self._ending:
            if self._ended:
                return
            self.record_all()
            if self.client is not None:
                self.client.close(linger=0)
            self.remote_hosts.dismiss()
            if patience_s and not any(who.state == STOPPED for who in self.processes):
                for who in (self.mpiexec, self.controller):
                    if who:
                        who.signal(signal.SIGTERM)
                cluster_records.await_end(self.processes, patience_s)
            self.remote_hosts.close()
            self._record.end()
            self._record_path.unlink(missing_ok=True)
            atexit.unregister(self.stop)
            self._ended = True

    def record_all(self) -> None:
        """Take note of every process that belongs to the cluster right now."""
        family = {*_family(self.controller), *_family(self.mpiexec), *self.remote_hosts.connections}
        if new := family - set(self._record.processes):
            known = tuple(who for who in self._record.processes if who.runs)
            self._record = dataclasses.replace(self._record, processes=(*known, *new))
            self._record.write(self._record_path)

    def log(self) -> str:
        """What mpiexec and the engines wrote themselves."""
        # ipyparallel takes the file away when mpiexec has ended, and keeps what was in it.
        text = "".join(log.read_text(errors="replace") for log in self.profile.glob("log/ipengine*"))
        if not text and self.cluster.engine_set is not None:
            text = self.cluster.engine_set.get_output()
        return text

    def fault(self, pid: int) -> str:
        """What Python left of an engine's crash."""
        file = cluster_records.fault_file(self.profile, pid)
        return file.read_text(errors="replace") if file.exists() else ""

    def log_tail(self, lines: int = 4) -> str:
        """The last lines of :meth:`log`; mpiexec's own, which tell less, only when there are no others."""
        text = self.log()
        told = _MPIEXEC.sub("", text).strip() or text
        return "\n".join([line for line in told.splitlines() if line.strip()][-lines:])

    def identify_rank(self, info: RankInfo) -> Identity | RemoteRank:
        """Who a rank is; raises ``StartError`` when it has ended already."""
        who = self.remote_hosts.rank(info.machine, info.pid) or identify(info.pid)
        if who is None:
            raise StartError(f"Rank {info.rank} (pid {info.pid}) ended while it was starting. {self.log_tail()}")
        return who

    def check_up(self) -> None:
        """Raise ``StartError`` when a process that the start needs has ended."""
        for what, who in (("mpiexec", self.mpiexec), ("The controller", self.controller)):
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
        while len(self.client.ids) < self.n:
            up = len(self.client.ids)
            progress(f"{up} of {self.n} ranks are up", (1 + up / self.n) / len(_PHASES))
            self.check_up()
            if time.monotonic() > deadline:
                raise StartError(
                    f"Only {up} of {self.n} ranks were up in time. Give them longer with --timeout, or start fewer. "
                    f"{self.log_tail()}"
                )
            time.sleep(0.02)


def _make_folders() -> tuple[Path, ...]:
    """The cluster's own, and one for memory that its ranks share: in memory, where there is a place for that."""
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
    """A process, while it runs, and everything below it."""
    if top is None or not top.runs:
        return ()
    with suppress(psutil.NoSuchProcess):
        below = [identify(child.pid) for child in psutil.Process(top.pid).children(recursive=True)]
        return (top, *(who for who in below if who))
    return ()


def environment(threads: int, device: str) -> dict[str, str]:
    """What ranks find in their environment, on top of what they inherit. People's own HOROVOD_ and OMPI_ values win."""
    wanted = {
        **LAUNCH_VARIABLES,
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "mpi",
        # Horovod's default of 128 MiB suits large GPUs; on a virtual one it would hide the model.
        "HOROVOD_FUSION_THRESHOLD": str((16 if device == "cpu" else 128) * 2**20),
        # Ranks watch their waiting themselves (engine/pulse.py); Horovod's inspector would free them at its own time.
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_LOG_LEVEL": "error",
        "PYTHONUNBUFFERED": "1",
    }
    return {key: os.environ.get(key, value) for key, value in wanted.items()} | {"OMP_NUM_THREADS": str(threads)}


def _quiet_log() -> logging.Logger:
    log = logging.getLogger("gpumem_nb.cluster")
    log.setLevel(logging.CRITICAL)  # how a cluster ended is told by cluster/autopsy.py
    return log
