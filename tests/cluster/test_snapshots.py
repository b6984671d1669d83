"""Automatic snapshots: taken by themselves, cheap, bounded, and what a restart goes on from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared import snapshot_folder, state_file
from gpumem_nb.shared.cluster_records import await_end
from gpumem_nb.shared.errors import ClusterDied, StateFileError
from gpumem_nb.shared.processes import Identity
from tests.cluster.test_save import LIMIT, attach_own, losses
from tests.conftest import about, ranks
from tests.internals import LIVE, latest_snapshot_expression, snapshots_of, traces_expression
from tests.timing import HANG_S, until

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def usual_rules(two_ranks: Session) -> None:
    two_ranks.set(snapshot_steps="auto", snapshot_space="4GiB")


def keep_asking(session: Session) -> None:
    for _ in range(200):
        session.run("rank", timeout=HANG_S)


def snapshots(session: Session) -> list[int]:
    """Steps of the snapshots of what is loaded, newest first, once all are written."""
    session.run("import threading\nfor t in threading.enumerate():\n    '_write' in t.name and t.join(100)")
    plan = snapshots_of(session)
    return [state_file.verify(path).steps for path in snapshot_folder.newest_first(plan.folder, plan.generation)]


def kill_a_rank(session: Session) -> None:
    psutil.Process(session.ranks[1].pid).kill()
    with pytest.raises(ClusterDied):
        keep_asking(session)


def test_a_flip_is_preceded_by_a_snapshot_of_the_settings_before_it(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.train(3)
    session.set(batch_size=16)
    assert snapshots(session) == [3]
    plan = snapshots_of(session)
    header = state_file.verify(snapshot_folder.newest_first(plan.folder, plan.generation)[0])
    assert (header.settings["batch_size"], header.ranks, header.position) == (32, 2, 3 * 32 * 2)
    session.set(batch_size=8)
    assert snapshots(session) == [3], "no step was done since"
    session.train(2)
    assert "last snapshot at step 3" in str(session.status())
    assert re.search(r"snapshots cost [\d.]+ % of training time", json.loads(session.status().to_json())["snapshots"])
    assert plan.folder.stat().st_mode & 0o777 == 0o700


def test_every_so_many_steps_and_two_are_kept(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.set(snapshot_steps=4)
    for _ in range(9):  # one at a time: a snapshot may be left out while the one before it is still written
        session.train(2)
        snapshots(session)
    assert snapshots(session) == [16, 12]


def test_a_snapshot_takes_no_device_memory(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.set(snapshot_steps="never")
    session.train(3)
    live = session.run(LIVE)
    session.set(snapshot_steps=1)
    session.train(2)
    assert snapshots(session)
    assert session.run(LIVE) == about(live)


def test_the_space_is_never_passed(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    attach_own(two_ranks)
    two_ranks.run("net.register_buffer('ballast', torch.zeros(100_000))")
    two_ranks.attach(model="net", loss="criterion", data="rows")
    session = fresh(two_ranks)  # what was attached before takes nothing of the space
    session.set(snapshot_steps=2, snapshot_space="64KiB")
    began_s = session.history.now_s()
    session.train(8)
    assert snapshots(session) == []
    session.train(1)
    notes = [event.text for event in session.history.events if event.time_s >= began_s and "snapshot" in event.text]
    assert len(notes) == 1
    assert re.search(r"it takes .* more than is left of the 64.0 KiB", notes[0])
    assert "No snapshot was kept" in str(session.status())
    session.set(snapshot_space="250KiB")
    session.train(2)
    root = snapshots_of(session).folder.parent
    # Two would take more.
    until(lambda: len(snapshots(session)) == 1, lambda: (session.status(), list(root.rglob("*"))))
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= 250 * 2**10


def test_what_could_not_be_kept_is_not_ended_by_a_restart_or_for_being_idle(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.set(snapshot_space="1KiB")
    session.train(2)
    try:
        said = r"2 steps would be lost\. No snapshot was kept: .*%hvd_save FILE; .*%hvd_stop, .*%hvd_resume FILE"
        with pytest.raises(StateFileError, match=said):
            session.restart()
        session.set(idle_minutes=0.01)
        until(lambda: any("not stopped after" in event.text for event in list(session.history.events)))
        assert not session.ended
    finally:
        session.set(idle_minutes="never")
    assert session.train(1).steps == 1


def test_a_full_disk_is_noted_and_training_goes_on(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.train(1)
    session.run(LIMIT.format(20_000))
    try:
        session.set(batch_size=16)
        assert snapshots(session) == []
        assert session.train(2).steps == 2
    finally:
        session.run(LIMIT.format("resource.RLIM_INFINITY"))
    assert any("No snapshot was kept" in event.text for event in session.history.events)
    assert not list(snapshots_of(session).folder.glob(".*"))
    session.set(batch_size=8)
    assert snapshots(session) == [3]


@pytest.mark.full
def test_taking_them_changes_no_loss(two_ranks: Session) -> None:
    def run(every: int | str) -> list[tuple[int, int, float]]:
        attach_own(two_ranks)
        two_ranks.set(snapshot_steps=every)
        return losses(two_ranks, 12)

    assert run(1) == run("never")


@pytest.mark.full
def test_a_restart_of_living_ranks_loses_nothing(two_ranks: Session) -> None:
    session = two_ranks
    attach_own(session)
    session.set(batch_size=16, precision="fp32", optimizer="momentum")
    session.train(7)
    session.save(path := snapshots_of(session).folder.parent / "reference.state")
    expected = losses(session, 4)
    session.resume(path)
    session.set(learning_rate=0.5)
    session.set(learning_rate=1e-3)
    old = [info.pid for info in session.ranks]
    session.restart()
    path.unlink()
    assert not set(old) & {info.pid for info in session.ranks}
    assert session.restored == "step 7 restored"
    assert session.settings.optimizer == "momentum"
    assert losses(session, 4) == expected


@pytest.mark.full
def test_attached_objects_that_cannot_be_kept_are_named_at_restart(two_ranks: Session) -> None:
    session = two_ranks
    attach_own(session)
    session.run("import threading\nnet.lock = threading.Lock()")
    session.attach(model="net", loss="criterion", data="rows")
    session.train(2)
    session.restart()
    assert re.search(r"Nothing is loaded: .* could not be kept \(TypeError: .*lock", session.restored)
    attach_own(session)
    assert session.resume().steps == 2
    assert session.train(1).steps == 1


def test_without_a_snapshot_resuming_says_so(
    two_ranks: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(snapshots_of(two_ranks), "folder", tmp_path / "root" / "session")
    with pytest.raises(StateFileError, match="There is no automatic snapshot"):
        two_ranks.resume()


KILLED = f"""
import json, os, signal, sys
from pathlib import Path
from gpumem_nb.shared import snapshot_folder
snapshot_folder.root = lambda: Path(sys.argv[1])
import gpumem_nb
session = gpumem_nb.start(2, device="cpu")
session.load("digits-resnet", width=8, depth=1, resolution=8)
session.train(6)
session.set(snapshot_steps=1)
session.train(1)
while {latest_snapshot_expression("session")} is None:
    session.train(1)
print(json.dumps({traces_expression("session")}), flush=True)
os.kill(session.ranks[1].pid, signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


# Of a kernel whose ranks are all well: see test_side_by_side.py.
@pytest.mark.full
def test_nothing_outlives_a_kernel_that_was_killed_but_its_snapshots_even_if_a_rank_is_stopped(
    two_ranks: Session, fresh: Callable[..., Session], snapshots_of_tests: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(snapshots_of_tests)]
    kernel = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=HANG_S)
    record, folders, processes = json.loads(kernel.stdout)
    assert len(processes) >= 4, "controller, mpiexec and two ranks at least"
    assert len(folders) == 2
    assert await_end([Identity(*who) for who in processes], timeout_s=HANG_S)
    assert not [path for path in (record, *folders) if Path(path).exists()]

    session = fresh(two_ranks)
    session.train(4)
    session.set(batch_size=16)
    snapshots(session)
    session.train(1)
    folder = snapshots_of(session).folder
    session.stop()
    assert sorted(path.name.rpartition("-")[2] for path in folder.iterdir()) == ["000000004.state", "notebook", "over"]
    session = ranks(2)
    assert session.resume().steps == 4, "of the session before this one"
    assert session.settings.batch_size == 32
    assert session.train(1).steps == 1
    shutil.rmtree(folder)
    for own in snapshot_folder.newest_first(snapshots_of(session).folder):
        own.unlink()
    assert session.resume().steps >= 6, "of the kernel that was killed"
    assert session.train(1).steps == 1


@pytest.mark.full
def test_a_snapshot_that_came_to_nothing_is_not_the_last(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.set(snapshot_steps=5)
    session.run(
        """
from horovod.common.exceptions import HorovodInternalError
import gpumem_nb.engine.storing.snapshots as snapshots_of_rank
taking = snapshots_of_rank.capture.capture
def come_apart(*args):
    snapshots_of_rank.capture.capture = taking
    raise HorovodInternalError("Horovod has been shut down")
snapshots_of_rank.capture.capture = come_apart
"""
    )
    session.train(40)
    assert session.run("snapshots_of_rank.capture.capture is taking") == [True, True], "one snapshot was dropped"
    assert "last snapshot at step" in session.status().snapshots
    session.set(snapshot_steps="auto")
