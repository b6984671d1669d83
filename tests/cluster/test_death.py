"""A process of the cluster that ends is noticed, named and explained; nothing of the cluster stays."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpumem_nb
from gpumem_nb.kernel.loading import Loading
from gpumem_nb.session import Session
from gpumem_nb.shared.cluster_records import await_end
from gpumem_nb.shared.errors import ClusterDied, GpumemError
from gpumem_nb.shared.processes import Identity, identify
from tests import internals
from tests.internals import wait_for_steps
from tests.timing import HANG_S, in_time, until

pytestmark = pytest.mark.cluster
NOTICED_S = 3.0


def pid_of(session: Session, who: str) -> int:
    return internals.mpiexec_of(session) if who == "mpiexec" else session.ranks[1].pid


def train(session: Session) -> None:
    session.train(1_000_000)


def cell(session: Session) -> None:
    session.run("import time\nprint('almost there', flush=True)\nwhile True: time.sleep(0.05)")


@pytest.fixture
def traces() -> Iterator[list[object]]:
    """The cluster's processes and folders of the test, which must be gone at its end."""
    kept: list[object] = []
    yield kept
    assert kept
    processes = [who for who in kept if isinstance(who, Identity)]
    assert await_end(processes, timeout_s=HANG_S)
    paths = [path for path in kept if isinstance(path, Path)]
    until(lambda: not any(path.exists() for path in paths), lambda: paths)


def remember(session: Session, traces: list[object]) -> None:
    traces += [*internals.processes_of(session), *internals.folders_of(session), internals.record_of(session)]


KILLED, SEGFAULT, MPIEXEC = (
    ("rank", signal.SIGKILL, r"Rank 1 \(pid {pid}\) was killed by signal 9 \(SIGKILL\)"),
    ("rank", signal.SIGSEGV, r"Rank 1 \(pid {pid}\) was killed by signal 11 \(SIGSEGV\).*Segmentation fault"),
    ("mpiexec", signal.SIGKILL, r"The launcher mpiexec \(pid {pid}\) was killed by signal 9"),
)


# Ranks and controllers that are killed in every situation are in the fault matrix.
@pytest.mark.parametrize(
    ("victim", "number", "sentence", "doing"),
    [
        pytest.param(*KILLED, cell, id="rank killed-cell", marks=pytest.mark.full),
        pytest.param(*SEGFAULT, train, id="rank segfault-train", marks=pytest.mark.full),
        pytest.param(*MPIEXEC, cell, id="mpiexec killed-cell"),
    ],
)
def test_a_death_is_noticed_named_and_cleaned_up(
    victim: str,
    number: int,
    sentence: str,
    doing: Callable[[Session], None],
    two_ranks: Session,
    fresh: Callable[..., Session],
    traces: list[object],
) -> None:
    quotes_output = doing is cell and number == signal.SIGKILL and victim == "rank"
    session = fresh(two_ranks.restart() if quotes_output else two_ranks)  # nothing of earlier tests is in its log
    remember(session, traces)
    if victim == "mpiexec":
        session.set(batch_size=16)
    pid = pid_of(session, victim)
    killed_s: list[float] = []

    def kill() -> None:
        if doing is cell:
            wait_for_output(session)
        else:
            wait_for_steps(session, 3)
        killed_s.append(time.monotonic())
        os.kill(pid, number)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ClusterDied, match=sentence.format(pid=pid)) as caught:
        doing(session)
    told_s = time.monotonic()
    killer.join()
    assert in_time(told_s - killed_s[0], NOTICED_S)
    assert "%hvd_restart" in str(caught.value)
    if quotes_output:
        assert "Its last lines: “almost there”" in str(caught.value)
    with pytest.raises(GpumemError, match="hvd_restart"):
        session.train(1)
    assert "Traceback" not in session.doing
    if victim == "mpiexec":
        session.restart()
        assert session.restored.startswith("digits-resnet loaded afresh")
        assert session.settings.batch_size == 16, "set before, although nothing was trained with it"
        assert session.train(1).steps == 1


def wait_for_output(session: Session) -> None:
    """Of all ranks: that of the one which dies may come last."""
    until(lambda: internals.printed_so_far(session).count("almost there") == session.size)


@pytest.mark.full
def test_a_rank_that_exits_by_itself_is_named_with_its_code_and_starting_after_a_death_needs_no_stop(
    two_ranks: Session,
) -> None:
    with pytest.raises(ClusterDied, match=r"Rank 1 \(pid \d+\) ended with exit code 3"):
        two_ranks.run("import os\nif rank == 1: os._exit(3)\nimport time\ntime.sleep(60)")
    with gpumem_nb.start(1, device="cpu") as again:
        assert again.run("rank") == [0]


@pytest.mark.full
def test_a_stopped_rank_is_not_dead_and_does_not_hold_up_the_end(two_ranks: Session, traces: list[object]) -> None:
    session = two_ranks
    remember(session, traces)
    pid = session.ranks[1].pid
    os.kill(pid, signal.SIGSTOP)
    await_words(session, f"rank 1 is stopped (SIGSTOP): continue it with kill -CONT {pid}, or start again with %hvd_re")
    assert "SIGSTOP" in str(session.status())
    os.kill(pid, signal.SIGCONT)
    assert session.run("rank") == [0, 1]
    assert "SIGSTOP" not in session.doing
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    session.stop()
    assert in_time(time.monotonic() - began, 3.0)


@pytest.mark.full
def test_an_idle_session_stops_itself_unless_somebody_comes_back_says_so_and_can_go_on(
    two_ranks: Session, fresh: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, traces: list[object]
) -> None:
    taking, go_on, take = threading.Semaphore(0), threading.Semaphore(0), Loading.take_last_snapshot

    def slowly(self: Loading) -> bool:
        taken = take(self)
        taking.release()
        assert go_on.acquire(timeout=HANG_S)
        return taken

    session = fresh(two_ranks)
    session.train(3)
    remember(session, traces)
    with monkeypatch.context() as patch:
        patch.setattr(Loading, "take_last_snapshot", slowly)
        session.set(idle_minutes=0.03)
        session.run("import time; time.sleep(2.1)")  # work counts, however quiet
        assert not session.ended
        assert not taking.acquire(blocking=False)
        await_words(session, "the ranks stop in")
        assert taking.acquire(timeout=HANG_S)
        assert session.run("rank") == [0, 1], "over before the last snapshot is"
        go_on.release()
        assert taking.acquire(timeout=HANG_S), "it goes on watching"
        session.run("import time; time.sleep(1)")
        go_on.release()
        assert taking.acquire(timeout=HANG_S)
        assert not session.ended
        go_on.release()
        await_words(session, "stopped after 0.03 minutes without work")
    assert "idle_minutes=never" in session.history.events[-1].text
    with pytest.raises(GpumemError, match=r"without work.*hvd_restart"):
        session.run("rank")
    session.restart()
    assert session.restored.startswith("step 3 restored")
    session.set(idle_minutes="never")


def await_words(session: Session, words: str) -> None:
    until(lambda: words in session.doing, lambda: session.doing)


@pytest.mark.full
def test_pids_that_were_given_to_someone_else_are_left_alone() -> None:
    me = identify(os.getpid())
    assert me
    former = Identity(me.pid, me.started - 1)
    assert not former.runs
    assert not former.signal(signal.SIGKILL), "or this line is never reached"
