"""The other hosts of a cluster together: reached, told about the controller and their ranks, and let go."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...shared.errors import StartError
from ...shared.processes import Identity
from .connection import RemoteHost, RemoteRank, ranks_on
from .parsing import Host


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
