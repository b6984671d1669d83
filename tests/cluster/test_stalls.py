"""Ranks that wait for ranks that do not come are freed, joined again, and keep what they trained."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpumem_nb.cluster import ranks as cluster_ranks
from gpumem_nb.kernel.training.state import Wakeup
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import RankError, TrainingFailed
from tests.cluster.stop_button import PROMPT_S, Stop
from tests.conftest import weights
from tests.timing import HANG_S, in_time, until

pytestmark = pytest.mark.cluster

LIMIT_S = 2
FREED_S = LIMIT_S + 4  # at the limit, give or take a second, and two seconds for an interrupt


@contextmanager
def limited(session: Session) -> Iterator[Session]:
    session.set(stall_limit_s=LIMIT_S)
    yield session
    session.set(stall_limit_s=30)


@pytest.fixture
def impatient(two_ranks: Session) -> Iterator[Session]:
    with limited(two_ranks) as session:
        yield session


# C code that no signal ends: a mutex that the thread holds itself, until there is a file.
IN_C = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
def in_c():
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    threading.Thread(target=unlock, args=[mutex]).start()
    libc.pthread_mutex_lock(mutex)
def unlock(mutex):
    while not os.path.exists(way_out):
        time.sleep(0.05)
    libc.pthread_mutex_unlock(mutex)
"""
STUCK = f"""{IN_C}
import types
from torch import nn
struck = types.ModuleType("gpumem_nb.struck")
struck.already = False
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
stuck = None
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        while stuck == "data" and rank == 1:
            pass
        return torch.randn(4)
rows = Rows()
def loss(model, batch):
    global stuck
    if stuck == "sleep" and rank == 1:
        time.sleep(1000)
    if stuck == "c" and rank == 1:
        in_c()
    if stuck == "all":
        time.sleep(4)
    if stuck == "slow":
        time.sleep(step_s)
    if stuck == "once" and rank == 1 and not struck.already:
        struck.already = True  # in a module, which a step that is undone does not put back
        time.sleep(1000)
    return model(batch).square().mean()
"""

SLOW_DISK = f"""
import os
sync = os.fsync
def slowly(file):
    if threading.current_thread() is threading.main_thread():  # not an automatic snapshot's
        os.fsync = sync
        time.sleep({LIMIT_S + 2})
    sync(file)
os.fsync = slowly
"""


def attach(session: Session) -> Session:
    session.set(stall_limit_s=30)  # a busy machine may hold one rank up for long
    session.run(STUCK)
    session.attach(model="net", loss="loss", data="rows")
    session.set(batch_size=2)
    session.train(2)
    session.set(stall_limit_s=LIMIT_S)
    return session


def goes_on(session: Session, fingerprint: set[str] | None = None) -> None:
    if fingerprint:
        assert weights(session) == fingerprint
    assert session.train(2).steps == 2
    assert len(weights(session)) == 1


def test_one_rank_alone_in_a_collective_is_freed(impatient: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(impatient)
    session.set(stall_limit_s=30)
    session.train(2)
    session.set(stall_limit_s=LIMIT_S)
    before = weights(session)
    start_s = time.monotonic()
    with pytest.raises(RankError, match=r"Rank 0 was idle, rank 1 waited in all-reduce 'mine' of a cell"):
        session.run("hvd.allreduce(torch.ones(3), name='mine')", ranks="1")
    assert in_time(time.monotonic() - start_s, FREED_S)
    assert session.history.events[-1].kind == "stall"
    assert session.run("hvd.allreduce(torch.ones(1), op=hvd.Sum).item()") == [2.0, 2.0]
    goes_on(session, before)


@pytest.mark.full
def test_ranks_in_different_collectives_are_freed(impatient: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(impatient)
    with pytest.raises(RankError, match=r"(?s)[Rr]ank 0 waited in broadcast 'n0'.*rank 1 waited in all-gather 'n1'"):
        session.run(
            "hvd.broadcast(torch.ones(1), 0, name='n0') if rank == 0 else hvd.allgather(torch.ones(1), name='n1')"
        )
    goes_on(session)


# One that computes in the data part is in the fault matrix.
def test_a_rank_stuck_in_its_step_is_named_and_interrupted(impatient: Session) -> None:
    session = attach(impatient)
    before = weights(session)
    session.run("stuck = 'sleep'")
    start_s = time.monotonic()
    with pytest.raises(TrainingFailed, match="Rank 1 was in the forward part of step 3, rank 0 waited in the grad"):
        session.train(5)
    assert in_time(time.monotonic() - start_s, FREED_S)
    session.run("stuck = None", timeout=HANG_S)
    goes_on(session, before)


@pytest.mark.full
def test_training_again_at_once_after_a_stall_joins_the_ranks(
    impatient: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = attach(impatient)
    ring = Wakeup.notify

    def late(wakeup: Wakeup) -> None:
        time.sleep(0.05)  # answers to the joining arrive meanwhile, and must be taken in
        ring(wakeup)

    session.run("stuck = 'once'")
    monkeypatch.setattr(Wakeup, "notify", late)
    with pytest.raises(TrainingFailed, match="Rank 1 was in the forward part of step 3"):
        session.train(5)
    goes_on(session)


@pytest.mark.full
def test_the_notebook_is_answered_while_ranks_are_being_joined(
    impatient: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_ranks, "REJOIN_TIMEOUT_S", 1.0)
    session = attach(impatient)
    session.run("hvd.shutdown()")
    os.kill(session.ranks[1].pid, signal.SIGSTOP)
    try:
        session.play()
        until(lambda: session.doing.startswith("rank 1 is stopped"))
        session.status()  # used to wait for the ranks
        until(lambda: not session.playing)
        assert not session.ended  # they used to be given up for dead
        stop = Stop(lambda: session.playing)
        assert "Interrupted." in str(session.train(5))
        assert in_time(stop.took_s(), PROMPT_S)
    finally:
        os.kill(session.ranks[1].pid, signal.SIGCONT)
    session.pause()
    goes_on(session)


@pytest.mark.full
def test_a_collective_that_begins_while_horovod_ends_fails_and_does_not_hang(impatient: Session) -> None:
    session = attach(impatient)
    for turn in range(5):
        session.run(
            f"""
from horovod.common.exceptions import HorovodInternalError
from gpumem_nb.internals import horovod_internals
held = [torch.ones(1) for _ in range(3000 if rank == 0 else 0)]  # rank 1 never begins these
waiting = [hvd.allreduce_async_(one, name=f"never.{turn}.{{number}}") for number, one in enumerate(held)]
hvd.allreduce(torch.zeros(1), name="begun.{turn}")
number = 0
try:
    while rank == 0:  # until rank 1 has ended it
        number += 1
        hvd.allreduce_async_(torch.ones(1), name=f"more.{turn}.{{number}}")
except HorovodInternalError:
    pass
horovod_internals.end_threads()
""",
            timeout=HANG_S,
        )
        goes_on(session)


# A chunk is sent ahead while one is under way, if it is expected to take less than a second.
@pytest.mark.full
@pytest.mark.parametrize(
    ("step_s", "wait"),
    [
        (0.6, Session.pause),
        (1.2, Session.pause),
        (0.6, Session.memory),
        (0.6, lambda session: session.run("1 + 1")),
    ],
)
def test_whoever_waits_waits_for_one_slow_step_at_most(
    impatient: Session, step_s: float, wait: Callable[[Session], object]
) -> None:
    session = attach(impatient)
    session.run(f"stuck, step_s = 'slow', {step_s}")
    session.play()
    begun = session.history.steps
    until(lambda: session.history.steps >= begun + 2)  # by then it is known how long a step takes
    before = session.history.steps
    wait(session)
    assert session.history.steps <= before + 1
    session.pause()
    session.run("stuck = None")
    goes_on(session)


@pytest.mark.full
def test_a_stall_while_playing_pauses_and_is_told(impatient: Session) -> None:
    session = attach(impatient)
    session.set(stall_limit_s=6)  # long enough to be seen waiting, on a busy machine too
    session.run("stuck = 'data'")
    session.play()
    seen: set[str] = set()
    until(lambda: seen.add(session.doing.split(" for ")[0]) or not session.playing)  # type: ignore[func-returns-value]
    assert "Rank 1 is in the data part of step 3, rank 0 waits in the gradient reduction of step 3" in seen
    assert "stall" in [event.kind for event in session.history.events]
    session.run("stuck = None", timeout=HANG_S)
    found = session.doctor().findings[0]
    assert (found.cause, found.do[-10:]) == ("training paused", "%hvd_play.")
    assert "Rank 1 " in found.sentence
    goes_on(session)


@pytest.mark.full
def test_a_step_that_is_long_on_all_ranks_is_no_stall(impatient: Session) -> None:
    session = attach(impatient)
    session.run("stuck = 'all'")
    events = len(session.history.events)
    readings = session.history.readings
    done = threading.Event()

    def train() -> None:
        session.train(1)
        done.set()

    threading.Thread(target=train).start()
    while not done.is_set() and session.history.readings is readings:
        done.wait(0.05)
    assert not done.is_set(), "device readings must come while the step is under way"
    assert done.wait(HANG_S)
    session.run("stuck = None")
    assert len(session.history.events) == events
    goes_on(session)


@pytest.mark.full
def test_a_disk_that_is_slow_while_saving_is_no_stall(impatient: Session, tmp_path: Path) -> None:
    session = attach(impatient)
    session.run(SLOW_DISK)
    events = len(session.history.events)
    session.play()
    assert session.save(tmp_path / "slow.state").seconds > LIMIT_S
    assert len(session.history.events) == events
    assert session.playing
    session.pause()
    goes_on(session)


def test_a_cell_that_shuts_horovod_down_is_made_up_for(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.train(2)
    before = weights(session)
    session.run("hvd.shutdown()")
    goes_on(session, before)
    session.run("hvd.shutdown()", ranks="1")
    goes_on(session)


def test_an_interrupt_reaches_a_rank_in_a_collective(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.train(2)
    start_s = time.monotonic()
    with pytest.raises(TimeoutError):
        session.run("hvd.allreduce(torch.ones(3))", ranks="1", timeout=0.5)
    assert in_time(time.monotonic() - start_s, FREED_S)
    goes_on(session)


@pytest.mark.full
def test_a_cell_stuck_on_one_rank_is_interrupted(impatient: Session) -> None:
    session = impatient
    with pytest.raises(RankError, match="Rank 1 was in a cell, rank 0 waited in barrier of a cell for"):
        session.run("while rank == 1: pass\nhvd.barrier()")
    assert session.run("hvd.allreduce(torch.ones(1), op=hvd.Sum).item()", timeout=HANG_S) == [2.0, 2.0]


@pytest.mark.full
def test_a_long_cell_on_one_rank_is_left_alone(impatient: Session, tmp_path: Path) -> None:
    session = attach(impatient)
    session.set(snapshot_steps=1)  # chunks of one step are not left early: the other rank begins the next one
    session.play()

    def let_the_cell_end() -> None:
        try:
            until(lambda: not session.playing, lambda: session.doing)
        finally:
            (tmp_path / "told").touch()

    watching = threading.Thread(target=let_the_cell_end)
    watching.start()
    told = str(tmp_path / "told")
    assert session.run(f"while not os.path.exists({told!r}): time.sleep(0.05)\nrank", ranks="1") == [1]
    watching.join()
    session.set(snapshot_steps="auto")
    assert not session.playing
    assert "Rank 1 was in a cell, rank 0 waited in the " in session.doing
    goes_on(session)


@pytest.mark.full
def test_a_rank_that_no_interrupt_reaches_is_named_with_the_way_out(impatient: Session, tmp_path: Path) -> None:
    session = attach(impatient)
    session.run(f"stuck, way_out = 'c', {str(tmp_path / 'way out')!r}")
    with pytest.raises(TrainingFailed, match="Rank 1 was in the forward part"):
        session.train(5)
    until(lambda: "could not be interrupted" in session.history.events[-1].text)
    with pytest.raises(TrainingFailed, match=r"rank 1 could not be interrupted. Start .* %hvd_restart"):
        session.train(1)
    (tmp_path / "way out").touch()
    session.run("stuck = None", timeout=HANG_S)
    goes_on(session)


@pytest.mark.full
def test_a_rank_that_is_stopped_is_named_with_the_way_out(impatient: Session) -> None:
    session = attach(impatient)
    os.kill(session.ranks[1].pid, signal.SIGSTOP)
    try:
        with pytest.raises(TrainingFailed, match=r"(?s)Rank 1 is not responding, rank 0 waits .* %hvd_restart"):
            session.train(10_000)
        with pytest.raises(TrainingFailed, match="%hvd_restart"):
            session.play()
    finally:
        os.kill(session.ranks[1].pid, signal.SIGCONT)
    session.run("rank", timeout=HANG_S)
    goes_on(session)


@pytest.mark.full
def test_a_stall_in_the_update_leaves_the_weights_as_they_were(impatient: Session) -> None:
    session = attach(impatient)
    session.run(
        """
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        if stuck == "update" and rank == 1:
            time.sleep(5)
own = Slow(net.parameters(), lr=0.01)
"""
    )
    session.attach(model="net", loss="loss", data="rows", optimizer="own")
    session.train(2)
    before = weights(session)
    session.run("stuck = 'update'")
    with pytest.raises(TrainingFailed, match="Rank 1 was in the update part of step 3, rank 0 waited in the agreement"):
        session.train(1)
    session.run("stuck = None", timeout=HANG_S)
    goes_on(session, before)
