"""Ranks started by Open MPI's ``mpiexec``, on this machine or on several hosts that ssh reaches.

PRRTE, Open MPI's launcher, listens on every interface for daemons on other hosts, even when there are none, and none of
its settings changes that: a preloaded library keeps its ports on the loopback interface.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from ...install.mpi_tools import HERE, LAUNCH_VARIABLES, require_tool
from ...shared.allocator_settings import VARIABLES
from .. import exit_reason
from .base import Job, Launcher

_SOURCE = Path(__file__).with_name("loopback.c")
_COMPILE_TIMEOUT_S = 60


def _loopback_variables() -> dict[str, str]:
    """Return what mpiexec's environment needs; nothing where there is no C compiler, and its ports stay as they are."""
    library = _library()
    if library is None:
        return {}
    return {"LD_PRELOAD": ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))}


def _loopback_arguments() -> list[str]:
    """Gives the ranks the environment that they would have had: what people's code binds is their business."""
    return ["-x", f"LD_PRELOAD={os.environ.get('LD_PRELOAD', '')}"] if _library() else []


@cache
def _library() -> Path | None:
    """Return the compiled library, built once into the user's cache."""
    key = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    target = platformdirs.user_cache_path("gpumem_nb") / "loopback" / f"loopback-{os.uname().machine}-{key}.so"
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                built = Path(folder) / target.name
                compiler = shlex.split(os.environ.get("CC") or "cc")
                command = [*compiler, "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(built), "-ldl"]
                subprocess.run(command, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=True)
                built.replace(target)  # so that no process loads half a library
    except (OSError, subprocess.SubprocessError):
        return None
    return None if set(str(target)) & set(" :") else target  # which separate the entries of LD_PRELOAD


SMALL_LIMIT_BYTES = 2 * 2**30
_SAID_BY_MPIEXEC = re.compile(r"^-{40,}$.*?^-{40,}$", re.MULTILINE | re.DOTALL)


class MpiLauncher(Launcher):
    """As of :class:`.base.Launcher`."""

    engine_set = "mpi"
    starter_name = "mpiexec"

    def __init__(self, job: Job) -> None:
        self._command = self.command()
        super().__init__(job)

    def command(self) -> list[str]:
        """Return the words before mpiexec's arguments; the process must become mpiexec. Raises ``SetupError``."""
        return [str(require_tool("mpiexec"))]

    def settings(self, engine_arguments: list[str]) -> dict[str, dict[str, Any]]:
        """As of :class:`.base.Launcher`."""
        variables = environment(self.job.threads, self.job.device, self.job.memory_limit)
        mpi_folders = {
            "OMPI_MCA_btl_sm_backing_directory": str(self.folders[-1]),
            "PRTE_MCA_prte_tmpdir_base": str(self.profile),
            "PMIX_MCA_pmix_server_tmpdir": str(self.profile),
        }
        if self.remote_hosts.hosts:
            more, arguments = self._variables_between_hosts(), []
        else:
            more, arguments = _loopback_variables() | HERE, _loopback_arguments()
        return {
            "MPIEngineSetLauncher": {
                "mpi_cmd": self._command,
                "mpi_args": [*self._placing([*variables]), *arguments],
                "environment": variables | mpi_folders | more,
                "engine_args": engine_arguments,
            }
        }

    def verdict(self) -> tuple[int, int] | None:
        """As of :class:`.base.Launcher`."""
        return exit_reason.verdict(self.log())

    def left_host(self) -> str:
        """As of :class:`.base.Launcher`."""
        return exit_reason.left_host(self.log())

    def hosts_that_gave_up(self) -> set[str]:
        """As of :class:`.base.Launcher`."""
        return exit_reason.hosts_that_gave_up(self.log())

    def own_lines(self) -> str:
        """As of :class:`.base.Launcher`: mpiexec's tell less."""
        text = self.log()
        return _SAID_BY_MPIEXEC.sub("", text).strip() or text

    def _placing(self, exported: list[str]) -> list[str]:
        """Return the placement of ranks; ``exported`` lacks connection information, which would cross the network."""
        if not self.job.hosts:
            return []
        set_here = [name for name in ("PYTHONPATH", *VARIABLES) if name in os.environ]
        names = [*exported, "IPP_CLUSTER_ID", "IPP_PROFILE_DIR", *set_here]
        # mpiexec knows this machine by its own name, however people call it.
        places = [f"{os.uname().nodename if host.here else host.name}:{host.ranks}" for host in self.job.hosts]
        # Filled one after the other, and not bound to cores, as without hosts.
        placing = ["--host", ",".join(places), "--map-by", "slot", "--bind-to", "none"]
        return [*placing, *(word for name in names for word in ("-x", name))]

    def _variables_between_hosts(self) -> dict[str, str]:
        return {
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_btl_tcp_if_include": ",".join(self.remote_hosts.networks),
            # The same place as here, and marked so that it can be found when it is orphaned.
            "PRTE_MCA_prte_launch_agent": f"env IPP_PROFILE_DIR={self.profile} {require_tool('prted')}",
        }


def environment(threads: int, device: str, memory_limit: int | None = None) -> dict[str, str]:
    """Return the environment added to what ranks inherit. Your own HOROVOD_ and OMPI_ values win."""
    small = device == "cpu" or (memory_limit is not None and memory_limit < SMALL_LIMIT_BYTES)
    wanted = {
        **LAUNCH_VARIABLES,
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "mpi",
        # Horovod's default of 128 MiB suits large GPUs; under a workshop's limit it would hide the model.
        "HOROVOD_FUSION_THRESHOLD": str((16 if small else 128) * 2**20),
        # Ranks watch their waiting themselves (engine/link/pulse.py); Horovod's inspector would free them at its
        # own time.
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_LOG_LEVEL": "error",
        "PYTHONUNBUFFERED": "1",
        # Text hashes alike on all ranks, so that a set of it has one order: a vocabulary made in a cell, for example.
        "PYTHONHASHSEED": "0",
    }
    # What else is said to Horovod holds on all hosts alike, which inherit nothing.
    wanted |= {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    return {key: os.environ.get(key, value) for key, value in wanted.items()} | {"OMP_NUM_THREADS": str(threads)}
