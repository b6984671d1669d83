"""Looking after processes, one look at a time: a process stands in for a rank, and no cluster is started."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from gpumem_nb.cluster.hosts.connection import RemoteHost, RemoteRank
from gpumem_nb.cluster.launchers import Job
from gpumem_nb.cluster.launchers.mpi import MpiLauncher
from gpumem_nb.cluster.watch import Watch
from gpumem_nb.shared.errors import ClusterDied
from gpumem_nb.shared.processes import Identity, identify
from tests.unit.test_exit_reason import GAVE_UP


@pytest.fixture
def launcher() -> Iterator[MpiLauncher]:
    """One that has started nothing."""
    made = MpiLauncher(Job(size=1, threads=1, device="cpu", memory_limit=None, hosts=(), start_up=""))
    yield made
    made.stop()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_the_first_look_after_an_end_tells_of_it_and_ends_the_rest(
    launcher: MpiLauncher, sleeper: subprocess.Popen[bytes]
) -> None:
    rank = identify(sleeper.pid)
    assert rank
    told: list[ClusterDied] = []
    watch = Watch(launcher, [rank], lambda number: "", told.append)
    assert not watch.look()
    assert launcher.profile.exists()
    end(sleeper)
    assert watch.look()
    assert [error.cause for error in told] == [f"Rank 0 (pid {sleeper.pid}) has ended."]
    assert not launcher.profile.exists()
    assert not watch.look(), "it is told once"


class OtherHost(RemoteHost):
    """A host that cannot be reached from here; its only rank has ended, which it tells after some questions."""

    def __init__(self, tells_after: int) -> None:
        self.name, self.names, self.lost, self.ssh = "b", {"b"}, "", None
        self.tells_after = tells_after

    def state_of(self, pid: int) -> str:
        self.tells_after -= 1
        return "S" if self.tells_after > 0 else ""

    def fault_of(self, pid: int) -> str:
        return ""

    def dismiss(self) -> None:
        """Nothing runs there."""

    def close(self) -> None:
        """Nothing is held."""


def test_a_rank_that_only_lost_its_connection_to_another_is_not_blamed(
    launcher: MpiLauncher, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, host = identify(sleeper.pid), OtherHost(tells_after=5)
    assert here
    launcher.remote_hosts.hosts.append(host)
    monkeypatch.setattr(launcher, "log", lambda: GAVE_UP.replace("[a:", f"[{os.uname().nodename}:"))
    told: list[ClusterDied] = []
    watch = Watch(launcher, [here, RemoteRank(host, 123)], lambda number: "", told.append)
    assert not watch.look()
    end(sleeper)
    assert watch.look()
    assert told[0].cause == "Rank 1 (pid 123 on host b) has ended."


def test_ranks_that_all_lost_their_connections_are_not_blamed(
    launcher: MpiLauncher, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, host = identify(sleeper.pid), OtherHost(tells_after=5)
    assert here
    launcher.remote_hosts.hosts.append(host)
    both = GAVE_UP.replace("[a:", f"[{os.uname().nodename}:") + GAVE_UP.replace("[a:", "[b:")
    monkeypatch.setattr(launcher, "log", lambda: both)
    told: list[ClusterDied] = []
    watch = Watch(launcher, [here, RemoteRank(host, 123)], lambda number: "", told.append)
    end(sleeper)
    assert watch.look()
    assert told[0].cause.startswith("A rank has ended. Which one, and how, is not known")


def test_a_host_that_is_lost_while_its_rank_is_missed_is_named(
    launcher: MpiLauncher, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, host = identify(sleeper.pid), OtherHost(tells_after=1000)
    assert here
    launcher.remote_hosts.hosts.append(host)

    def log() -> str:
        host.lost = "is down."  # by the time that anybody reads what MPI said
        return GAVE_UP.replace("[a:", f"[{os.uname().nodename}:")

    monkeypatch.setattr(launcher, "log", log)
    told: list[ClusterDied] = []
    watch = Watch(launcher, [here, RemoteRank(host, 123)], lambda number: "", told.append)
    end(sleeper)
    assert watch.look()
    assert told[0].cause == "Host b (rank 1) is down."


def test_an_end_on_purpose_is_not_told(launcher: MpiLauncher, sleeper: subprocess.Popen[bytes]) -> None:
    rank = identify(sleeper.pid)
    assert isinstance(rank, Identity)
    watch = Watch(launcher, [rank], lambda number: "", lambda error: pytest.fail(str(error)))
    watch.stop()
    end(sleeper)
    assert not watch.look()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
