"""Start an ipyparallel cluster of MPI engines and stop it again, leaving nothing behind."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
from traitlets.config import Config

from ..errors import StartError
from .mpi_tools import LAUNCH_VARIABLES, require_tool

Progress = Callable[[str, float], None]
"""Told what is being waited for, and how much of the start is done (0 to 1)."""

_PHASES = ("controller", "engines", "horovod")
_LABELS = {
    "controller": "starting the controller",
    "engines": "starting the ranks",
    "horovod": "joining the ranks with Horovod",
}


class Processes:
    """The operating system processes of one cluster, known by pid and creation time."""

    def __init__(self) -> None:
        self._processes: dict[tuple[int, float], psutil.Process] = {}

    def record(self, pid: int) -> None:
        """Remember a process and everything below it."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                self._processes[process.pid, process.create_time()] = process

    def end(self, patience_s: float) -> None:
        """Wait for all of them to end; kill those that do not. psutil refuses pids that were given to someone else."""
        for process in list(self._processes.values()):
            self.record(process.pid)
        if self._all_gone(patience_s):
            return
        for process in self._processes.values():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._all_gone(patience_s)

    def _all_gone(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while any(_runs(process) for process in self._processes.values()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def _runs(process: psutil.Process) -> bool:
    """A zombie has ended: only its parent has not asked how yet, and in a container that parent may never ask."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _pid_runs(pid: int) -> bool:
    try:
        return _runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


class Launched:
    """A running cluster.

    Args:
        n: number of engines.
        variables: what they find in their environment.
        start_up: makes the code that each runs first, from the pids of this kernel and of the controller and the
            profile folder, so that ranks can end when their kernel is gone.

    Attributes:
        client: connected ipyparallel client; engine id = MPI rank = Horovod rank.
        seconds: how long each phase of the start took.
    """

    def __init__(self, n: int, variables: dict[str, str], start_up: Callable[[int, int, str], str]) -> None:
        mpiexec = str(require_tool("mpiexec"))
        self.n = n
        self.seconds: dict[str, float] = {}
        self.processes = Processes()
        # A profile of its own, readable by its owner only: connection files and logs go with the cluster.
        try:
            self.profile = Path(tempfile.mkdtemp(prefix="gpumem_nb-ranks-"))
        except OSError as error:
            raise StartError(
                f"No folder for connection files could be made ({error}). Free some disk, or set TMPDIR to a folder "
                "that you can write to, and start again."
            ) from None
        self._start_up = start_up
        self.client: Any = None
        self.cluster = ipyparallel.Cluster(
            n=n,
            engines="mpi",
            profile_dir=str(self.profile),
            delay=0,
            load_profile=False,
            controller_args=[
                "--log-level=ERROR",
                "--HeartMonitor.period=300",
                "--HeartMonitor.max_heartmonitor_misses=100",
            ],
            config=Config({"MPILauncher": {"mpi_cmd": [mpiexec], "environment": variables}}),
            parent=None,
            log=_quiet_log(),
        )

    def start(self, deadline: float, progress: Progress) -> None:
        """Start controller and engines and connect. ``deadline`` is on the clock of ``time.monotonic``."""
        with self.phase("controller", progress):
            self.cluster.start_controller_sync()
            self.processes.record(self.cluster.controller.pid)
        with self.phase("engines", progress):
            code = self._start_up(os.getpid(), self.cluster.controller.pid, str(self.profile))
            self.cluster.config.MPIEngineSetLauncher.engine_args = [
                "--log-level=ERROR",
                f"--IPEngine.startup_command={code}",
            ]
            self.cluster.start_engines_sync(self.n)
            self.client = self.cluster.connect_client_sync()
            self._await_engines(deadline, progress)
            self.processes.record(self.cluster.engine_set.pid)

    def stop(self) -> None:
        """End all processes, wait until they are gone, and remove the profile."""
        self.record_all()
        if self.client is not None:
            self.client.close()
        if self.cluster.controller is not None:
            self.cluster.stop_cluster_sync()
        self.processes.end(patience_s=5.0)
        shutil.rmtree(self.profile, ignore_errors=True)

    def record_all(self) -> None:
        """Take note of every process that belongs to the cluster right now."""
        for launcher in (self.cluster.controller, self.cluster.engine_set):
            if launcher is not None and launcher.pid > 0:
                self.processes.record(launcher.pid)

    def log_tail(self, lines: int = 4) -> str:
        """The last lines that mpiexec and the engines wrote themselves."""
        # ipyparallel takes the file away when mpiexec has ended, and keeps what was in it.
        text = "".join(log.read_text(errors="replace") for log in self.profile.glob("log/ipengine*"))
        if not text and self.cluster.engine_set is not None:
            text = self.cluster.engine_set.get_output()
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

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
            if not _pid_runs(self.cluster.engine_set.pid):
                raise StartError(f"mpiexec ended before all ranks were up. It said: {self.log_tail()}")
            if time.monotonic() > deadline:
                raise StartError(
                    f"Only {up} of {self.n} ranks were up in time. Give them longer with --timeout, or start fewer. "
                    f"{self.log_tail()}"
                )
            time.sleep(0.02)


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
    log.setLevel(logging.ERROR)
    return log
