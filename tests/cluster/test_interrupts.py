"""The stop button gives the prompt back within two seconds, reaches the ranks, and names the way out."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from gpumem_nb import Workload
from gpumem_nb.cluster import ranks as cluster_ranks
from gpumem_nb.kernel.loading import ATTACHED
from gpumem_nb.session import Session
from gpumem_nb.shared import state_file
from gpumem_nb.shared.errors import Interrupted, WorkloadError
from tests import internals
from tests.cluster.stop_button import PROMPT_S, Stop, asked
from tests.cluster.test_save import losses
from tests.cluster.test_stalls import IN_C
from tests.conftest import weights
from tests.internals import wait_for_steps
from tests.tiers import every, first_tier
from tests.timing import HANG_S, in_time, patience, slowness, until

pytestmark = pytest.mark.cluster
STUCK = """
from torch import nn
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
rows = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
stuck = False
def loss(model, batch):
    if rank == 1 and stuck == "python":
        while stuck: pass
    if rank == 1 and stuck == "C":
        sum(range(10**11))  # minutes, without a look at signals
    return model(batch[0]).square().mean()
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long ranks may take to stop, as it is on an idle machine: on a busy one they need so many times as long.

    In the first tier they have longer, anyway.
    """
    if patience() == 1:
        monkeypatch.setattr(cluster_ranks, "INTERRUPT_TIMEOUT_S", slowness() * cluster_ranks.INTERRUPT_TIMEOUT_S)


def stuck(session: Session, kind: str) -> Session:
    session.run(STUCK)
    session.attach(model="net", loss="loss", data="rows")
    session.train(1)
    session.run(f"stuck = {kind!r}")
    return session


@pytest.mark.parametrize(
    "doing",
    first_tier(
        [
            lambda session: session.memory(),
            lambda session: session.pause(),
            lambda session: session.load("digits-resnet"),
            lambda session: session.push({"a": 1}),
        ],
        every(2),
    ),
    ids=["memory", "pause", "load", "push"],
)
def test_a_rank_stuck_in_python_is_interrupted(two_ranks: Session, doing: Callable[[Session], object]) -> None:
    session = stuck(two_ranks, "python")
    session.play()
    wait_until_waiting(session)
    stop = Stop(asked(session))
    with pytest.raises(Interrupted, match="are ready"):
        doing(session)
    assert in_time(stop.took_s(), PROMPT_S)
    session.pause()
    session.run("stuck = False")
    assert len(weights(session)) == 1
    assert session.train(1).steps == 1


def test_training_stuck_in_python_is_interrupted_and_goes_on(two_ranks: Session) -> None:
    session = stuck(two_ranks, "python")
    stop = Stop(asked(session))
    assert "Interrupted." in str(session.train(5))
    assert in_time(stop.took_s(), PROMPT_S)
    session.run("stuck = False")
    assert len(weights(session)) == 1
    assert session.train(1).steps == 1


def wait_until_waiting(session: Session) -> None:
    until(lambda: session.waiting_for in ([1], [0, 1]))


def test_training_pauses_when_whoever_is_told_of_its_progress_fails(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)

    def tell(what: str, done: float) -> None:
        if done:
            raise OSError("nobody listens")

    with pytest.raises(OSError, match="nobody listens"):
        session.train(10_000, progress=tell)
    assert not session.playing
    steps = session.history.steps
    assert 0 < steps < 10_000
    assert session.train(1).steps == 1
    assert session.history.steps == steps + 1


def test_a_cell_is_interrupted_on_all_ranks(two_ranks: Session) -> None:
    stop = Stop(asked(two_ranks))
    with pytest.raises(Interrupted, match="are ready"):
        two_ranks.run("import time\nfor _ in range(1000): time.sleep(0.1)")
    assert in_time(stop.took_s(), PROMPT_S)
    assert two_ranks.run("rank") == [0, 1]


def test_what_stops_a_cell_of_one_rank_leaves_training_alone(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.play()
    wait_for_steps(session, 3)
    try:
        for timeout in (None, 0.5):
            steps, stop = session.history.steps, Stop(asked(session)) if timeout is None else None
            with pytest.raises(Interrupted if stop else TimeoutError):
                session.run("import time\nfor _ in range(1000): time.sleep(0.1)", ranks=0, timeout=timeout)
            assert stop is None or in_time(stop.took_s(), PROMPT_S)
            wait_for_steps(session, steps + 50)
            assert session.playing
    finally:
        session.pause()


@pytest.mark.full
def test_a_rank_stuck_in_c_code_is_named_and_an_end_that_is_interrupted_goes_on_by_itself(
    two_ranks: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = stuck(two_ranks, "C")
    way_out = tmp_path / "way out"
    session.run(f"{IN_C}\nway_out = {str(way_out)!r}")
    says = r"Ranks? (0-)?1 ha\w+ not stopped yet.*%hvd_restart"
    stop = Stop(asked(session))
    with pytest.raises(Interrupted, match=says):
        session.run("in_c()", ranks="1")
    assert in_time(stop.took_s(), PROMPT_S)
    way_out.touch()
    assert session.run("rank", timeout=HANG_S) == [0, 1]
    stop = Stop(asked(session))
    with pytest.raises(Interrupted, match=says):
        session.train(5)
    assert in_time(stop.took_s(), PROMPT_S)

    processes = internals.processes_of(session)
    attached = internals.snapshots_of(session).folder / ATTACHED
    attached.parent.mkdir(exist_ok=True)
    attached.touch()
    ending, go_on = threading.Event(), threading.Event()

    def slowly(end: Callable[[], None]) -> None:
        ending.set()
        go_on.wait(HANG_S)
        end()

    internals.end_by(monkeypatch, session, slowly)
    stop = Stop(ending.is_set)
    with pytest.raises(KeyboardInterrupt):
        session.stop()
    assert in_time(stop.took_s(), PROMPT_S)
    began = time.monotonic()
    go_on.set()
    until(lambda: not any(who.runs for who in processes))
    assert in_time(time.monotonic() - began, 3.0)
    until(lambda: not attached.exists(), lambda: list(attached.parent.iterdir()))


@pytest.mark.full
def test_a_stopped_rank_is_named_a_second_interrupt_gives_the_prompt_at_once_and_a_restart_forgets_both(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.set(snapshot_steps="never")
    os.kill(session.ranks[1].pid, signal.SIGSTOP)
    stop = Stop(asked(session))
    with pytest.raises(Interrupted, match=r"Rank 1 has not stopped yet"):
        session.run("rank")
    assert in_time(stop.took_s(), PROMPT_S)
    stop = Stop(asked(session), times=2)
    with pytest.raises(Interrupted, match=r"Interrupted twice.*restore the training: %hvd_restart"):
        session.run("rank")
    assert in_time(stop.took_s(), 1.0)
    session.restart()
    session.play()
    wait_for_steps(session, 5)
    session.restart()  # asks the new ranks for a snapshot, although they are busy
    assert "lost" not in session.restored
    session.set(snapshot_steps="auto")


def test_a_flip_that_waits_is_interrupted(two_ranks: Session) -> None:
    session = two_ranks
    session.run(STUCK)
    session.attach(model="net", loss="loss", data="rows")
    session.train(1)
    until(lambda: not internals.ranks_have_requests(session))  # a snapshot that is still made would count as one
    stopped = session.ranks[0].pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        stop = Stop(asked(session))
        with pytest.raises(Interrupted, match="Rank"):
            session.set(learning_rate=0.123)
    finally:  # else it would keep the tests after this one waiting
        os.kill(stopped, signal.SIGCONT)
    assert in_time(stop.took_s(), PROMPT_S)
    assert session.train(1).steps == 1


def slow_to_make(begun: Path, hears: bool) -> Workload:
    """A workload whose model takes long to be made, and may not care about interrupts."""

    def model() -> torch.nn.Module:
        begun.touch()
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            if hears:
                raise
        return torch.nn.Linear(4, 2)

    def rows() -> Dataset[tuple[torch.Tensor, ...]]:
        return torch.utils.data.TensorDataset(torch.zeros(64, 4))

    return Workload("slow", model, rows, lambda model, batch: model(batch[0]).square().mean())


@pytest.mark.full
def test_an_interrupted_load_leaves_nothing_half_loaded(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    for hears in (False, True):
        session = fresh(two_ranks)
        session.train(2)
        begun = tmp_path / f"begun {hears}"
        stop = Stop(begun.exists)
        with pytest.raises(Interrupted) as told:
            session.load(slow_to_make(begun, hears))
        assert in_time(stop.took_s(), PROMPT_S)
        if "too late: slow was already loaded" in str(told.value):
            assert not hears
            assert session.train(1).steps == 1
            assert session.workload is not None
            assert session.workload.name == "slow"
        else:
            with pytest.raises(WorkloadError, match="Nothing is loaded"):
                session.train(1)
    session.restart()
    assert session.workload is not None
    assert session.workload.name == "digits-resnet"
    assert session.train(1).steps == 1


@pytest.mark.full
def test_an_interrupted_resume_is_done_or_not_begun(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    session.save(tmp_path / "two")
    expected = losses(session, 2)
    applying = tmp_path / "applying"

    def slow_to_apply() -> None:
        from gpumem_nb.engine.step.trainer import Trainer
        from gpumem_nb.engine.storing import restore

        apply = restore.Checked.apply

        def slowly(self: restore.Checked, trainer: Trainer, after_restart: bool = False) -> None:
            applying.touch()
            time.sleep(0.5)
            restore.Checked.apply = apply  # type: ignore[method-assign]
            self.apply(trainer, after_restart)

        restore.Checked.apply = slowly  # type: ignore[method-assign]

    session.run(slow_to_apply)
    stop = Stop(applying.exists)
    with pytest.raises(Interrupted, match="too late: digits-resnet was already resumed at step 2"):
        session.resume(tmp_path / "two")
    assert in_time(stop.took_s(), PROMPT_S)
    assert losses(session, 2) == expected
    assert session.history.steps == 4


@pytest.mark.full
def test_a_resume_that_is_interrupted_while_training_pauses_holds_nothing_of_the_file(
    two_ranks: Session, tmp_path: Path
) -> None:
    session, begun = stuck(two_ranks, ""), tmp_path / "begun"
    session.save(tmp_path / "one")
    session.run(
        "import pathlib\nfrom gpumem_nb.engine import rank as of_ranks\ndef loss(model, batch):\n"
        f"    while rank == 1 and of_ranks._checked: pathlib.Path({str(begun)!r}).touch()\n"
        "    return model(batch[0]).square().mean()"
    )
    session.attach(model="net", loss="loss", data="rows")
    session.play()
    wait_for_steps(session, 1)
    stop = Stop(begun.exists)
    with pytest.raises(Interrupted, match="before anything was resumed"):
        session.resume(tmp_path / "one")
    assert in_time(stop.took_s(), PROMPT_S)
    assert session.run("of_ranks._checked") == [None, None]
    assert session.train(1).steps == 1


@pytest.mark.full
def test_an_interrupted_save_leaves_a_whole_file_or_none(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.train(2)
    for moment in range(5):
        target = tmp_path / f"moment{moment}"
        stop = Stop(asked(session))
        with pytest.raises(Interrupted):
            save_and_wait(session, target)
        assert in_time(stop.took_s(), PROMPT_S)
        session.run("rank")  # the ranks are through with it
        if target.exists():
            assert state_file.verify(target).steps == session.history.steps
        assert not [path for path in tmp_path.iterdir() if not path.name.startswith("moment")]
        assert session.train(1).steps == 1
        assert len(weights(session)) == 1


def save_and_wait(session: Session, target: Path) -> None:
    session.save(target)
    session.run("import time\nfor _ in range(1000): time.sleep(0.1)")  # an interrupt may be too late for the other


@pytest.mark.full
def test_interrupts_at_random_moments_leave_the_ranks_together(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    for number in range(5):
        before = session.history.steps
        stop = Stop(lambda before=before, number=number: session.history.steps > before + number)  # type: ignore[misc]
        session.train(100_000)
        assert in_time(stop.took_s(), PROMPT_S)
        assert len(weights(session)) == 1
    wait_for_steps(session, 1)
