"""Looking after the processes and hosts of a cluster: the first that ends ends them all, and says why."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence

from ..shared.errors import ClusterDied
from ..shared.processes import STOPPED, Identity
from ..shared.units import name_ranks
from . import exit_reason
from .hosts.connection import SILENCE_S, RemoteHost, RemoteRank, ranks_on
from .launchers import Launcher

PERIOD_S = 0.25
VERDICT_TIMEOUT_S = 1.0
"""How long the launcher may take to say how a rank ended."""
HOST_TIMEOUT_S = SILENCE_S + 1.0
"""For a host to tell that a rank there has ended, or to be found lost."""
Needed = Identity | RemoteRank | RemoteHost


class Watch:
    """Looks at every process that the cluster cannot do without: once for each :meth:`look`, or on a thread of its own.

    Args:
        launcher: the cluster; ended at once when one of its processes has.
        ranks: who they are, in rank order.
        last_output: what a rank has printed in requests that it has not answered.
        died: told why, before the rest is ended.
    """

    def __init__(
        self,
        launcher: Launcher,
        ranks: Sequence[Identity | RemoteRank],
        last_output: Callable[[int], str],
        died: Callable[[ClusterDied], None],
    ) -> None:
        self._launcher = launcher
        self._ranks = ranks
        self._hosts = launcher.remote_hosts.hosts
        self._names: dict[Needed, str] = dict(launcher.essential.items())
        self._names |= {who: f"Rank {rank}" for rank, who in enumerate(ranks)}
        self._names |= {host: f"Host {host.name} ({name_ranks([*ranks_on(host, ranks)])})" for host in self._hosts}
        self._last_output = last_output
        self._died = died
        self._oom_kills = exit_reason.oom_kills()
        self._done = threading.Event()

    def start(self) -> None:
        """Look every :data:`PERIOD_S`, until one has ended or :meth:`stop`."""
        threading.Thread(target=self._run, name="gpumem_nb watch", daemon=True).start()

    def stop(self) -> None:
        """Look no more: the processes are about to be ended on purpose."""
        self._done.set()

    def stopped(self) -> list[Identity | RemoteRank]:
        """Return the ranks that were stopped (SIGSTOP): not dead, but they will not answer."""
        return [who for who in self._ranks if who.state == STOPPED]

    def look(self) -> bool:
        """Look once; says whether one had ended, and the cluster with it."""
        gone = [who for who in self._names if not who.runs]
        if not gone or self._done.is_set():
            return False
        self._done.set()
        try:
            why = self._explain(gone)
        except Exception as error:  # that it has ended is certain; callers must not wait because the reason is unknown
            why = f"{self._names[gone[0]]} has ended ({error!r} while the reason was looked for)."
        try:
            self._died(ClusterDied(why))
        finally:
            self._launcher.stop(timeout_s=0)
        return True

    def _run(self) -> None:
        while not self._done.wait(PERIOD_S):
            self.look()

    def _explain(self, gone: list[Needed]) -> str:
        """Return the first that ended: the launcher names the rank, and ends itself and the others because of it."""
        launcher = self._launcher
        if launcher.controller not in gone and (self._hosts or any(who in self._ranks for who in gone)):
            _await(lambda: launcher.verdict() is not None or self._no_verdict_will_come(), VERDICT_TIMEOUT_S)
        for host in self._hosts:
            if host.lost:
                return f"{self._names[host]} {host.lost}"
        kills = exit_reason.oom_kills()
        kills = None if kills is None or self._oom_kills is None else kills - self._oom_kills
        if verdict := launcher.verdict():
            return self._explain_rank(*verdict, kills)
        if self._hosts and self._connection_broke():
            return self._explain_missing(gone, kills)
        first = launcher.starter if launcher.starter in gone else gone[0]
        assert not isinstance(first, RemoteHost), "it would be lost"
        how = launcher.exit_code(first) if isinstance(first, Identity) else None
        if first in self._ranks:
            return self._explain_rank(self._ranks.index(first), how, kills)
        return exit_reason.explain(self._names[first], first.pid, how, kills, "")

    def _explain_rank(self, rank: int, code: int | None, oom_kills: int | None) -> str:
        who = self._ranks[rank]
        fault, place = self._launcher.fault(who.pid), ""
        if isinstance(who, RemoteRank):
            _await(lambda: not who.runs, VERDICT_TIMEOUT_S)
            fault, place = who.fault, who.host.name
        log = self._launcher.log()
        if code is None:  # others have missed it, and what MPI says there is of them
            log = exit_reason.without_mpi(log)
        words = exit_reason.last_words(fault, self._last_output(rank), log)
        return exit_reason.explain(f"Rank {rank}", who.pid, code, oom_kills, words, place)

    def _no_verdict_will_come(self) -> bool:
        """With several hosts, one may be lost, or the ranks themselves may have noticed that one of them ended."""
        starter = self._launcher.starter
        return bool(self._hosts) and (any(host.lost for host in self._hosts) or not (starter and starter.runs))

    def _connection_broke(self) -> bool:
        """Return whether ranks say that they lost others."""
        return bool(self._launcher.left_host() or self._launcher.hosts_that_gave_up())

    def _explain_missing(self, gone: list[Needed], oom_kills: int | None) -> str:
        """Explain ranks that others lost; how they ended is not known, but their host may report it a bit later."""
        _await(lambda: bool(self._missing()) or any(host.lost for host in self._hosts), HOST_TIMEOUT_S)
        for host in self._hosts:
            if host.lost:
                return f"{self._names[host]} {host.lost}"
        missing = self._missing()
        first = [rank for rank in missing if self._ranks[rank] in gone] or missing
        if len(first) == 1:
            return self._explain_rank(first[0], None, oom_kills)
        which = f"One of {name_ranks(first)}" if first else "A rank"
        return f"{which} has ended. Which one, and how, is not known: the others only lost their connections to it."

    def _missing(self) -> list[int]:
        """Ranks that have ended on the host that others name, or on one without reports of lost ranks."""
        named, gave_up = self._launcher.left_host(), self._launcher.hosts_that_gave_up()
        return [
            rank
            for rank, who in enumerate(self._ranks)
            if not who.runs and (_is_on(who, {named}) if named else not _is_on(who, gave_up))
        ]


def _is_on(who: Identity | RemoteRank, hosts: Collection[str]) -> bool:
    """Return whether it runs on one of these hosts, which MPI calls by the first part of their names."""
    names = who.host.names if isinstance(who, RemoteRank) else {os.uname().nodename}
    return any(name in hosts or name.partition(".")[0] in hosts for name in names)


def _await(told: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not told() and time.monotonic() < deadline:
        time.sleep(0.05)
