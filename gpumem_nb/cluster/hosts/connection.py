"""Other hosts as the kernel sees them: stewards that stand in for the kernel there, reached over ssh.

A host counts as lost when ssh's connection ends, and only then. ssh asks the ssh server for an answer and ends when
none comes, so a network or a machine that is down shows within :data:`SILENCE_S`, while a steward, an ssh or a kernel
that is merely slow or stopped ends nothing. A whole machine that is paused looks like one that is down: its ranks
cannot be told from dead ones, and are given up.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from ...shared.errors import StartError
from ...shared.processes import Identity, identify
from ...shared.version import __version__
from ..resources import Host, own_networks
from .steward import DISMISSED

SILENCE_S = 2
"""A host that answers nothing for so long is lost."""
_UNANSWERED = "not responding"
ENDING_S = 3.0
"""For a steward to end what runs on its host."""


class RemoteHost:
    """One other host.

    Attributes:
        names: those by which it may be called.
        machine: what :func:`gpumem_nb.shared.cluster_records.machine` says over there.
        kernel_address: this machine's address, as seen from there.
        networks: over which the two reach each other.
        ssh: the process that holds the connection.
        lost: why the host cannot be reached any more, in words; empty while it can.
    """

    def __init__(self, host: Host, errors: Path, opening: dict[str, Any]) -> None:
        self.name = host.name
        self.names = {host.name}
        self.machine = self.kernel_address = self.lost = ""
        self.networks: set[str] = set()
        self._errors = errors
        self._states: dict[int, str] = {}
        self._faults: dict[int, str] = {}
        self._unread = b""
        self._listener: threading.Thread | None = None
        path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
        steward = shlex.join(["env", *path, sys.executable, "-m", "gpumem_nb.cluster.hosts.steward"])
        # Asked after each half of the silence. Not through a connection that ssh shares, whose options are its own.
        answering = [f"ServerAliveInterval={SILENCE_S // 2}", "ServerAliveCountMax=1", "ControlPath=none"]
        settings = ["BatchMode=yes", "ConnectTimeout=10", "LogLevel=INFO", *answering]
        options = ["-4", "-T", "-a", "-x", *(word for setting in settings for word in ("-o", setting))]
        with errors.open("wb") as said:
            self._ssh = subprocess.Popen(
                ["ssh", *options, host.name, steward],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                bufsize=0,
                start_new_session=True,  # the stop button signals the kernel's whole group
            )
        self.ssh: Identity | None = identify(self._ssh.pid)
        self._send_line(opening)

    @property
    def runs(self) -> bool:
        """Return whether it can be reached."""
        return not self.lost

    @property
    def state(self) -> str:
        """Return the steward's state as a process has one: callers watch both alike."""
        return "" if self.lost else "S"

    def meet(self, deadline: float) -> None:
        """Wait until the steward says who it is; raises ``StartError`` when there is none, or ranks could not run."""
        while not (hello := _introduction(self._next_line(deadline))):  # what the shell over there prints first
            pass
        self.names.add(hello["name"])
        self.machine, self.kernel_address = hello["machine"], hello["kernel_address"]
        mask = own_networks().get(self.kernel_address)
        if hello["version"] != __version__ or not hello["horovod"] or mask is None:
            raise StartError(self._why_not(hello))
        here = ipaddress.ip_network(f"{self.kernel_address}/{mask}", strict=False)
        self.networks = {hello["network"], str(here)}
        self._listener = threading.Thread(target=self._listen, name=f"gpumem_nb host {self.name}", daemon=True)
        self._listener.start()

    def _next_line(self, deadline: float) -> bytes:
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._stdout.fileno(), 65536) if ready else b""
            if not data:
                raise StartError(self._why_no_steward(timed_out=not ready))
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def order(self, name: str, *arguments: Any) -> None:
        """Have the steward do something."""
        self._send_line([name, *arguments])

    def state_of(self, pid: int) -> str:
        """Return the state of a process over there, as of :class:`Identity`."""
        return self._states.get(pid, "S")

    def fault_of(self, pid: int) -> str:
        """Return what Python left of its crash."""
        return self._faults.get(pid, "")

    def dismiss(self) -> None:
        """Have the steward end everything on its host."""
        self.order(DISMISSED)
        with suppress(OSError):
            assert self._ssh.stdin
            self._ssh.stdin.close()

    def close(self) -> None:
        """Wait until a dismissed steward has ended, unless its host is lost."""
        if not self.lost:
            with suppress(subprocess.TimeoutExpired):
                self._ssh.wait(ENDING_S)
        self._ssh.kill()
        self._ssh.wait()
        if self._listener:
            self._listener.join()
        self._stdout.close()

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._ssh.stdout
        return self._ssh.stdout

    def _send_line(self, what: Any) -> None:
        with suppress(OSError, ValueError):  # the connection ended; the listening thread says why
            assert self._ssh.stdin
            self._ssh.stdin.write(json.dumps(what).encode() + b"\n")

    def _listen(self) -> None:
        try:
            while data := os.read(self._stdout.fileno(), 65536):
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    news = json.loads(line)
                    self._states.update({int(pid): state for pid, state in news["states"].items()})
                    self._faults.update({int(pid): fault for pid, fault in news["faults"].items()})
        except (OSError, ValueError, LookupError) as error:
            self.lost = f"sent what cannot be read ({error!r})."
            return
        if _UNANSWERED in (said := self._said()):
            self.lost = f"gave no sign of life for {SILENCE_S} s: the machine or its network is down."
        else:
            self.lost = f"ended the connection. {said}".rstrip()

    def _why_no_steward(self, timed_out: bool) -> str:
        if timed_out:
            return f"Host {self.name} did not answer in time. Give it longer with --timeout."
        said = self._said()
        if "No such file" in said or "not found" in said or "No module named" in said:
            return (
                f"Host {self.name} cannot run ranks: gpumem_nb must be installed there at the same path as here "
                f"({sys.executable}). {said}"
            )
        return f"Host {self.name} cannot be reached: ssh {self.name} must work without a password. {said}"

    def _why_not(self, hello: dict[str, Any]) -> str:
        if hello["version"] != __version__:
            return f"Host {self.name} has gpumem_nb {hello['version']}, here it is {__version__}: install the same one."
        if not hello["horovod"]:
            return f"Host {self.name} has no Horovod: build it there with python -m gpumem_nb.install.horovod_build"
        return (
            f"Host {self.name} sees this machine as {self.kernel_address}, which is not its address: the hosts must "
            "reach each other without address translation."
        )

    def _said(self) -> str:
        text = self._errors.read_text(errors="replace") if self._errors.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"It said: {lines[-1]}" if lines else ""


def _introduction(line: bytes) -> dict[str, Any]:
    """Return what a steward says of itself; nothing of any other line, such as one of a shell's startup files."""
    with suppress(ValueError):
        said = json.loads(line)
        return said if isinstance(said, dict) and "machine" in said else {}
    return {}


class RemoteRank(NamedTuple):
    """A process on another host, with what :class:`Identity` offers."""

    host: RemoteHost
    pid: int

    @property
    def state(self) -> str:
        """Return the state as :class:`Identity` does."""
        return self.host.state_of(self.pid)

    @property
    def runs(self) -> bool:
        """Return whether it has not ended, as far as known."""
        return bool(self.state)

    def signal(self, number: int) -> bool:
        """Ask the steward to send it a signal; return whether the steward was there."""
        self.host.order("signal", self.pid, number)
        return self.runs and self.host.runs

    @property
    def shell(self) -> str:
        """Return what goes before a command there."""
        return f"ssh {self.host.name} "

    @property
    def fault(self) -> str:
        """Return what Python left of its crash."""
        return self.host.fault_of(self.pid)


def ranks_on(host: RemoteHost, ranks: Sequence[Identity | RemoteRank]) -> dict[int, RemoteRank]:
    """Return the ranks that run on a host, by their numbers."""
    return {rank: who for rank, who in enumerate(ranks) if isinstance(who, RemoteRank) and who.host is host}


class RemoteHosts:
    """The other hosts of a cluster, if any.

    Args:
        hosts: all of them, this machine included and first; nothing changes when there are none.
        profile: the cluster's own folder.
        opening: what the stewards need first (the arguments of :class:`.steward.Steward`).
    """

    def __init__(self, hosts: Sequence[Host], profile: Path, opening: dict[str, Any]) -> None:
        self._all = hosts
        self._profile = profile
        self._opening = opening
        self.hosts: list[RemoteHost] = []

    def open(self, deadline: float) -> None:
        """Reach every host.

        Raises:
            StartError: one cannot be reached, or reaches this machine at another address than the others.
        """
        for host in self._all:
            if not host.here:
                self.hosts.append(RemoteHost(host, self._profile / f"ssh-{host.name}.txt", self._opening))
        for remote in self.hosts:
            remote.meet(deadline)
        if len(seen := {remote.kernel_address for remote in self.hosts}) > 1:
            raise StartError(
                f"The hosts reach this machine at different addresses ({', '.join(sorted(seen))}): name hosts of one "
                "network only."
            )

    def controller_arguments(self) -> list[str]:
        """Only engines on other hosts come from beyond loopback."""
        if not self._all:
            return []
        # Besides CurveZMQ ipyparallel's key, which it would leave out; in a file, not where lists of processes show it.
        settings = self._profile / "ipcontroller_config.py"
        with open(os.open(settings, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(f"c.Session.key = {secrets.token_hex(32).encode()!r}\nc.IPController.enable_curve = True\n")
        return [f"--IPController.engine_ip={self.hosts[0].kernel_address}"] if self.hosts else []

    def hand_over(self, connection_file: Path) -> None:
        """Tell the stewards how engines find the controller."""
        for remote in self.hosts:
            remote.order("connect", connection_file.name, json.loads(connection_file.read_text()))

    def rank(self, machine: str, pid: int) -> RemoteRank | None:
        """Return the rank with this pid on that machine; ``None`` when that is no other host."""
        return next((RemoteRank(remote, pid) for remote in self.hosts if remote.machine == machine), None)

    def look_after(self, ranks: Sequence[Identity | RemoteRank]) -> None:
        """Have the stewards look after their ranks."""
        for remote in self.hosts:
            remote.order("watch", [who.pid for who in ranks_on(remote, ranks).values()])

    @property
    def networks(self) -> list[str]:
        """Over which this machine and the others reach each other."""
        return sorted(set().union(*(remote.networks for remote in self.hosts)))

    @property
    def connections(self) -> list[Identity]:
        """The processes that hold the connections to the other hosts."""
        return [remote.ssh for remote in self.hosts if remote.ssh and remote.ssh.runs]

    def dismiss(self) -> None:
        """Have everything ended that runs on the other hosts."""
        for remote in self.hosts:
            remote.dismiss()

    def close(self) -> None:
        """Wait until that is done."""
        for remote in self.hosts:
            remote.close()
