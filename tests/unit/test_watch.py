"""Looking after processes, one look at a time: a process stands in for a rank, and no cluster is started."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from gpumem_nb.cluster.launchers import Job
from gpumem_nb.cluster.launchers.mpi import MpiLauncher
from gpumem_nb.cluster.watch import Watch
from gpumem_nb.shared.errors import ClusterDied
from gpumem_nb.shared.processes import Identity, identify


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
