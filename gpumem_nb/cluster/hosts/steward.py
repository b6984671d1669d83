"""Stands in for the notebook kernel on another host: the ranks there belong to it, and end with it.

``python -m gpumem_nb.cluster.hosts.steward``, started over ssh, whose connection is the only door: orders come in and
the ranks' states go out, one JSON object a line. It ends all that runs there when one of two connections ends: ssh's,
which the kernel's end closes, or one of TCP to the controller. That one carries nothing. The system at its other end
answers for it, so kernel and controller may be silent or stopped for as long as they like; it breaks when the
controller ends, or when the machine or the network over there is down, which ssh's server here would not notice for
hours. A machine that is paused as a whole cannot be told from one that is down. The steward's own end is noticed by its
ranks, as the kernel's is on the kernel's host.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from ...shared import cluster_records
from ...shared.processes import Identity, identify, marked
from ...shared.version import __version__
from ..resources import own_networks

PERIOD_S = 0.25
"""Between two reports of the ranks' states."""
UNANSWERED_S = 4
"""How long the machine of the controller may leave TCP's questions, one a second, without an answer."""
KERNEL_FIRST_S = 2.0
"""For the kernel to notice first that its controller has ended, and to dismiss the steward."""
KERNELS_HOST_FIRST_S = 5.0
DISMISSED = "dismissed"


class Steward:
    """The kernel's agent on this host, for a cluster whose kernel is on another one.

    Args:
        folders, ranks, device, memory_limit: as in the kernel's own record.
    """

    def __init__(self, folders: list[str], ranks: int, device: str, memory_limit: int | None) -> None:
        self._poller = zmq.Poller()
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._controller: Any = None
        self._breaks: Any = None  # tells when the connection to it does
        self._end_s = float("inf")  # once it has
        self._ranks: dict[int, Identity | None] = {}
        self._profile = Path(folders[0])
        for folder in folders:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        me = cluster_records.this_process()
        self._record = cluster_records.Record(
            cluster_records.machine(), me, (), tuple(folders), ranks=ranks, device=device, memory_limit=memory_limit
        )
        self._record_path = cluster_records.records_dir() / f"{me.pid}-{me.started}-steward.json"
        self._record.write(self._record_path)

    def connect(self, name: str, info: dict[str, Any]) -> None:
        """Put down the ``info`` with which engines find the controller, and connect to it too."""
        security = self._profile / "security"
        security.mkdir(mode=0o700, exist_ok=True)
        draft = security / f"{name}.new"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(info, file)
        draft.replace(security / name)  # an engine may be waiting for it
        self._controller = _connected(info)
        self._breaks = self._controller.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller.register(self._breaks, zmq.POLLIN)

    def watch(self, pids: list[int]) -> None:
        """Look after these ranks."""
        self._ranks = {pid: identify(pid) for pid in pids}

    def signal(self, pid: int, number: int) -> None:
        """Send a rank a signal."""
        if who := self._ranks.get(pid):
            who.signal(number)

    def serve(self) -> None:
        """Obey until dismissed, or a connection ends."""
        orders: dict[str, Callable[..., None]] = {
            "connect": self.connect,
            "watch": self.watch,
            "signal": self.signal,
        }
        unread = b""
        while time.monotonic() < self._end_s:
            ready = dict(self._poller.poll(int(PERIOD_S * 1000)))
            if self._breaks in ready:
                self._breaks.recv_multipart()
                self._end_s = min(self._end_s, time.monotonic() + KERNEL_FIRST_S)
            if sys.stdin.fileno() in ready:
                if not (data := os.read(sys.stdin.fileno(), 65536)):
                    # The kernel is gone. Ranks on its own host end the controller once they see that, but would not
                    # live to see it if those here ended before: MPI ends them for it.
                    cluster_records.await_end(marked(self._profile.name), KERNELS_HOST_FIRST_S)
                    return
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    name, *arguments = json.loads(line)
                    if name == DISMISSED:
                        return
                    orders[name](*arguments)
            _say({"states": {pid: who.state if who else "" for pid, who in self._ranks.items()}} | self._faults())

    def end(self) -> None:
        """End what runs here, and leave nothing."""
        zmq.Context.instance().destroy(linger=0)
        self._record.end(sparing=[os.getpid()])
        self._record_path.unlink(missing_ok=True)

    def _faults(self) -> dict[str, dict[int, str]]:
        """Return what Python left of the crashes of ranks that have ended."""
        files = {
            pid: cluster_records.fault_file(self._profile, pid)
            for pid, who in self._ranks.items()
            if not (who and who.runs)
        }
        return {"faults": {pid: file.read_text(errors="replace") for pid, file in files.items() if file.exists()}}


def main() -> None:
    """Say who this is, then serve."""
    cluster_records.clean_up_after_others()
    steward = Steward(**json.loads(sys.stdin.readline()))
    try:
        theirs, _, mine, _ = os.environ["SSH_CONNECTION"].split()
        network = ipaddress.ip_network(f"{mine}/{own_networks().get(mine, '32')}", strict=False)
        _say(
            {
                "name": os.uname().nodename,
                "machine": cluster_records.machine(),
                "kernel_address": theirs,
                "network": str(network),
                "version": __version__,
                "horovod": importlib.util.find_spec("horovod") is not None,
            }
        )
        steward.serve()
    except BrokenPipeError:
        pass
    finally:
        steward.end()


def _connected(info: dict[str, Any]) -> Any:
    """Return a connection to the controller's heartbeat that subscribes to nothing, and that TCP watches over."""
    socket: Any = zmq.Context.instance().socket(zmq.SUB)
    socket.curve_serverkey = info["curve_serverkey"].encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.tcp_keepalive = socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = 1
    socket.tcp_keepalive_cnt = UNANSWERED_S - 1
    socket.connect(f"{info['interface']}:{info['hb_ping']}")
    return socket


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
