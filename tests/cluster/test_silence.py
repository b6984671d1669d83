"""Nobody is dead by the clock: controller and ranks may be silent for as long as they like."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import gpumem_nb
from gpumem_nb.cluster.launchers import ipyparallel_cluster
from gpumem_nb.session import Session
from gpumem_nb.shared.cluster_records import await_end
from gpumem_nb.shared.processes import Identity, identify
from tests import internals
from tests.internals import wait_for_steps
from tests.timing import HANG_S, until

pytestmark = pytest.mark.cluster
BEAT_MS = 10  # at this pace the controller of old dropped an engine after 100 misses, in 1 s
LONG_S = 2.0
TEN_MINUTES_MS = 600_000

# An engine of old ended itself after 50 misses; its clock is made to run 80 times as fast, where it has one.
HURRY = """
from ipyparallel.engine.app import IPEngine
engine = IPEngine.instance()
if engine.max_heartbeat_misses:
    engine._hb_reporter.callback_time = 10
engine.max_heartbeat_misses
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Ranks with a controller whose clock runs thirty times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipyparallel_cluster, "HEARTBEAT_MS", BEAT_MS)
        with gpumem_nb.start(2, device="cpu", memory_limit="96MiB") as started:
            yield started


def controller_of(session: Session) -> list[psutil.Process]:
    """The controller with its schedulers."""
    first = psutil.Process(internals.controller_of(session))
    return [first, *first.children(recursive=True)]


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """These processes, meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def ranks_of(session: Session) -> list[Identity]:
    return [who for info in session.ranks if (who := identify(info.pid))]


@pytest.mark.full
def test_a_controller_that_is_silent_ends_nobody(session: Session) -> None:
    limits = session.run(HURRY)
    with stopped([process.pid for process in controller_of(session)]):
        assert not await_end(ranks_of(session)[:1], LONG_S)
    assert session.run("rank", timeout=HANG_S) == [0, 1]
    assert limits == [0, 0], "engines expect no heartbeat"


@pytest.mark.full
def test_a_rank_that_is_silent_stays_registered(session: Session) -> None:
    with stopped([session.ranks[1].pid]):
        assert not await_end(ranks_of(session)[:1], LONG_S)
    assert session.run("rank", timeout=HANG_S) == [0, 1]


# Rank 1 takes long over its samples once, in pieces that do not end sooner where it is stopped meanwhile.
SLOW = """
import pathlib, time, types
from torch import nn
slow = types.ModuleType("gpumem_nb.slow")
slow.once = False
net = nn.Linear(4, 3)
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if rank == 1 and slow.once:
            slow.once = False
            for _ in range(10):
                time.sleep(0.1)
        return torch.ones(4)
rows = Rows()
def loss(model, batch):
    if rank == 0:  # which waits for the other one next
        pathlib.Path(began).touch()
    return model(batch).square().mean()
"""


@pytest.mark.full
def test_ranks_that_are_silent_together_did_not_wait_for_one_another(session: Session, tmp_path: Path) -> None:
    began = tmp_path / "began"
    session.run(f"began = {str(began)!r}\n{SLOW}")
    session.attach(model="net", loss="loss", data="rows")
    session.set(stall_limit_s=2, batch_size=2)
    began.unlink(missing_ok=True)
    session.run("slow.once = True")
    session.play()
    until(began.exists)
    with stopped([info.pid for info in session.ranks]):  # as on a machine that is paused
        assert not await_end(ranks_of(session)[:1], LONG_S)
    wait_for_steps(session, 5)
    session.pause()
    assert not [event.text for event in session.history.events if event.kind == "stall"]


@pytest.mark.full
def test_silence_may_last_ten_minutes(session: Session) -> None:
    (misses,) = (
        int(word.rpartition("=")[2])
        for word in controller_of(session)[0].cmdline()
        if word.startswith("--HeartMonitor.max_heartmonitor_misses=")
    )
    assert misses * BEAT_MS > TEN_MINUTES_MS
