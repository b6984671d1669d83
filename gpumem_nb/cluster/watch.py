"""Looking after the processes and hosts of a cluster: the first that ends ends them all, and says why."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from ..shared.errors import ClusterDied
from ..shared.processes import STOPPED, Identity
from ..shared.ranklist import name_ranks
from . import autopsy
from .launch import Launched
from .remote import RemoteHost, RemoteRank, ranks_on

PERIOD_S = 0.25
VERDICT_PATIENCE_S = 1.0
"""How long mpiexec may take to say how a rank ended."""
Needed = Identity | RemoteRank | RemoteHost


class Watch:
    """A thread that looks at every process that the cluster cannot do without.

    Args:
        launched: the cluster; ended at once when one of its processes has.
        ranks: who they are, in rank order.
        last_output: what a rank has printed in requests that it has not answered.
        died: told why, before the rest is ended.
    """

    def __init__(
        self,
        launched: Launched,
        ranks: Sequence[Identity | RemoteRank],
        last_output: Callable[[int], str],
        died: Callable[[ClusterDied], None],
    ) -> None:
        self._launched = launched
        self._ranks = ranks
        self._hosts = launched.remote_hosts.hosts
        self._names: dict[Needed, str] = dict(launched.essential.items())
        self._names |= {who: f"Rank {rank}" for rank, who in enumerate(ranks)}
        self._names |= {host: f"Host {host.name} ({name_ranks([*ranks_on(host, ranks)])})" for host in self._hosts}
        self._last_output = last_output
        self._died = died
        self._oom_kills = autopsy.oom_kills()
        self._done = threading.Event()
        threading.Thread(target=self._look, name="gpumem_nb watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more: the processes are about to be ended on purpose."""
        self._done.set()

    def stopped(self) -> list[Identity | RemoteRank]:
        """Ranks that somebody has stopped (SIGSTOP): not dead, but they will not answer."""
        return [who for who in self._ranks if who.state == STOPPED]

    def _look(self) -> None:
        while not self._done.wait(PERIOD_S):
            gone = [who for who in self._names if not who.runs]
            if gone and not self._done.is_set():
                self._done.set()
                self._died(ClusterDied(self._explain(gone)))
                self._launched.stop(patience_s=0)

    def _explain(self, gone: list[Needed]) -> str:
        """The first that ended: mpiexec names the rank, and ends itself and the others because of it."""
        launched = self._launched
        if launched.controller not in gone and (self._hosts or any(who in self._ranks for who in gone)):
            _await(lambda: autopsy.verdict(launched.log()) is not None or self._no_verdict_will_come())
        for host in self._hosts:
            if host.lost:
                return f"{self._names[host]} {host.lost}"
        log = launched.log()
        kills = autopsy.oom_kills()
        kills = None if kills is None or self._oom_kills is None else kills - self._oom_kills
        if said := autopsy.verdict(log) or self._first_on(autopsy.left_host(log)):
            rank, code = said
            who = self._ranks[rank]
            fault, place = launched.fault(who.pid), ""
            if isinstance(who, RemoteRank):
                _await(lambda: not who.runs)
                fault, place = who.fault, who.host.name
            words = autopsy.last_words(fault, self._last_output(rank), log)
            return autopsy.explain(f"Rank {rank}", who.pid, code, kills, words, place)
        first = launched.mpiexec if launched.mpiexec in gone else gone[0]
        assert not isinstance(first, RemoteHost), "it would be lost"
        how = launched.exit_code(first) if isinstance(first, Identity) else None
        return autopsy.explain(self._names[first], first.pid, how, kills, "")

    def _no_verdict_will_come(self) -> bool:
        """With several hosts, one may be lost, or the ranks themselves may have noticed that one of them ended."""
        mpiexec = self._launched.mpiexec
        return bool(self._hosts) and (any(host.lost for host in self._hosts) or not (mpiexec and mpiexec.runs))

    def _first_on(self, name: str) -> tuple[int, int | None] | None:
        """The rank that ended on the host of this name; nobody knows how."""
        here = {os.uname().nodename}
        for rank, who in enumerate(self._ranks):
            if name in (who.host.names if isinstance(who, RemoteRank) else here) and not who.runs:
                return rank, None
        return None


def _await(told: Callable[[], bool]) -> None:
    deadline = time.monotonic() + VERDICT_PATIENCE_S
    while not told() and time.monotonic() < deadline:
        time.sleep(0.05)
