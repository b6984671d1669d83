"""Controller and engines as ipyparallel starts them, with settings under which no process is declared dead by timeout.

By default an engine ends itself after 40 s without the controller's heartbeat, and the controller drops an engine after
30 s without an answer. Here both may be silent for as long as they like (a busy machine, a suspended laptop, a stopped
process): who has ended is seen by those who watch processes (``cluster/watch.py``, ``engine/link/pulse.py``,
``cluster/hosts/steward.py``).
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import ipyparallel
import psutil
from traitlets.config import Config

from ...internals import ipyparallel_internals
from ...shared.processes import Identity, identify

HEARTBEAT_MS = 300
"""An engine is registered with the second one: the default of 3 s would make a start long."""
EXIT_CODE_TIMEOUT_S = 1.0
"""For what the system has told to ipyparallel's thread; it is there in milliseconds unless the machine is busy."""
_NEVER = 2**31 - 1
"""So many beats of an engine may the controller miss; ``0`` would be none at all."""


def make(size: int, engine_set: str, profile: Path) -> Any:
    """Return a cluster that has not been started, everything of which lies in its profile folder."""
    log = logging.getLogger("gpumem_nb.cluster")
    log.setLevel(logging.CRITICAL)  # how a cluster ended is told by cluster/exit_reason.py
    # A file beside the notebook may have the name of a module of Python's own, such as random.py: it is not for them.
    python, config = [sys.executable, "-P", "-m"], Config()
    config.ControllerLauncher.controller_cmd = [*python, "ipyparallel.controller"]
    config.EngineLauncher.engine_cmd = [*python, "ipyparallel.engine"]
    return ipyparallel.Cluster(
        n=size,
        engines=engine_set,
        profile_dir=str(profile),
        delay=0,
        load_profile=False,
        shutdown_atexit=False,
        config=config,
        parent=None,
        log=log,
    )


def start_controller(cluster: Any, timeout_s: int, arguments: list[str]) -> Identity | None:
    """Start it, with more arguments of the command ``ipcontroller``; says who it is."""
    cluster.controller_args = [
        "--log-level=ERROR",
        f"--HeartMonitor.period={HEARTBEAT_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={_NEVER}",
        f"--IPController.registration_timeout={timeout_s}",
        *arguments,
    ]
    cluster.start_controller_sync()
    return identify(cluster.controller.pid)


def engine_arguments(timeout_s: int, start_up: str) -> list[str]:
    """Arguments of the command ``ipengine``; ``start_up`` is code that runs first."""
    return [
        "--log-level=ERROR",
        "--IPEngine.max_heartbeat_misses=0",  # which means that none is expected
        # Signals go to the ranks themselves, and cluster/watch.py looks after them.
        "--IPEngine.enable_nanny=False",
        f"--IPEngine.wait_for_url_file={timeout_s}",
        f"--IPEngine.timeout={timeout_s}",
        f"--IPEngine.startup_command={start_up}",
    ]


def start_engines(cluster: Any, size: int, settings: dict[str, dict[str, Any]]) -> Identity | None:
    """Start them under these settings, by class; says who the process is that starts them."""
    cluster.config.merge(settings)
    cluster.start_engines_sync(size)
    return identify(cluster.engine_set.pid)


def connection_file(cluster: Any) -> Path:
    """Return the file by which engines find the controller."""
    return Path(cluster.controller.connection_files["engine"])


def exit_code(cluster: Any, pid: int) -> int | None:
    """Return how a process ended that was started here, negative for a signal; ``None`` if not known."""
    for launcher in (cluster.controller, cluster.engine_set):
        if launcher is not None and launcher.pid == pid:
            ipyparallel_internals.await_exit_code(launcher, EXIT_CODE_TIMEOUT_S)
            with suppress(psutil.Error):
                code = launcher.process.wait(0)
                return code if code is None else int(code)
    return None


def output(cluster: Any) -> str:
    """Return what the engines and what started them wrote, after the end."""
    return str(cluster.engine_set.get_output()) if cluster.engine_set is not None else ""
