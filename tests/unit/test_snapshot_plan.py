"""Snapshots are taken before flips and as often as they cost less than their share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_nb.kernel.policy import Policy
from gpumem_nb.kernel.snapshot_plan import SnapshotPlan
from gpumem_nb.shared.messages import ChunkReply, Reading, Stored
from gpumem_nb.shared.snapshot_folder import file_name, notebook_of
from gpumem_nb.shared.workload import WorkloadInfo
from tests.internals import cost_of

READING = Reading(0, 0, 0, 0, None, None)


class Run:
    """A run of chunks of 10 steps of 10 ms each, whose snapshots cost what the test says."""

    def __init__(self, folder: Path, held_up_s: float = 0.0, cpu_s: float = 0.0, **rules: object) -> None:
        self.policy = Policy(**rules)
        self.notes: list[str] = []
        self.plan = SnapshotPlan(folder / "own", lambda: self.policy, self.notes.append)
        self.plan.begin(WorkloadInfo("w", 1, 4, 100, 1), 0, None)
        self.held_up_s, self.cpu_s = held_up_s, cpu_s
        self.steps = 0
        self.taken: list[int] = []

    def chunk(self, count: int = 1, problem: str = "", size: int = 10) -> None:
        for _ in range(count):
            order = self.plan.order(self.steps)
            stored = None
            if order:
                self.taken.append(self.steps)
                path = f"{order.folder}/{file_name(order.generation, self.steps)}"
                stored = Stored(path, self.steps, size, self.cpu_s, problem)
            reply = ChunkReply(0, (), READING, snapshot_s=self.held_up_s if order else 0.0, stored=stored)
            self.plan.received(0.1, [reply])
            self.steps += 10


def test_cheap_snapshots_come_every_fifty_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, held_up_s=1e-6)
    run.chunk(16)
    assert run.taken == [50, 100, 150]
    assert "last snapshot at step 150, 10 B; snapshots cost 0.00 %" in run.plan.describe()


def test_dear_ones_come_as_rarely_as_keeps_their_cost_below_one_percent(tmp_path: Path) -> None:
    run = Run(tmp_path, held_up_s=0.01, cpu_s=0.01)  # aiming at half a percent: one in 4 s, which are 400 steps
    run.chunk(1000)
    assert len(run.taken) in (24, 25)
    cost_s, trained_s = cost_of(run.plan)
    assert cost_s < 0.01 * trained_s


def test_a_flip_is_preceded_by_one_unless_nothing_was_done_since(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.plan.flip()
    run.chunk()
    run.plan.flip()
    run.chunk()
    assert run.taken == [10]
    run.plan.order(10)
    run.plan.flip()
    assert run.plan.order(10) is None


def test_a_number_is_kept_to_whatever_it_costs(tmp_path: Path) -> None:
    run = Run(tmp_path, held_up_s=1.0, snapshot_steps=20)
    run.chunk(7)
    assert run.taken == [20, 40, 60]
    assert [run.plan.steps_left(steps) for steps in (60, 73, 80, 90)] == [20, 7, 1, 1]


def test_never_means_never(tmp_path: Path) -> None:
    run = Run(tmp_path, snapshot_steps="never")
    run.plan.flip()
    run.chunk(20)
    assert run.taken == []
    assert "snapshots are off" in run.plan.describe()


def test_one_that_does_not_fit_is_said_once_and_not_tried_again_until_there_is_room(tmp_path: Path) -> None:
    run = Run(tmp_path, snapshot_steps=10, snapshot_space=1000)
    run.chunk(5, problem="No snapshot was kept: it takes 2000 B.", size=2000)
    assert run.taken == [10]
    assert run.notes == ["No snapshot was kept: it takes 2000 B."]
    assert "No snapshot was kept" in run.plan.describe()
    run.policy = run.policy.replace(snapshot_space=3000)
    run.chunk(1)
    assert run.taken == [10, 50]
    assert "last snapshot at step 50" in run.plan.describe()


def test_while_one_is_written_no_other_is_asked_for(tmp_path: Path) -> None:
    run = Run(tmp_path, snapshot_steps=10)
    assert run.plan.order(10)
    assert run.plan.order(20) is None
    run.plan.received(0.1, [ChunkReply(0, (), READING, stored=Stored("", 10, 1, 0.0))])
    assert run.plan.order(30)


def test_a_workload_loaded_meanwhile_does_not_take_over_the_snapshot_of_the_old_one(tmp_path: Path) -> None:
    run = Run(tmp_path, snapshot_steps=10)
    order = run.plan.order(10)
    assert order
    run.plan.begin(WorkloadInfo("other", 1, 4, 100, 1), 0, None)
    late = Stored(f"{order.folder}/{file_name(order.generation, 10)}", 10, 1, 0.0)
    run.plan.received(0.1, [ChunkReply(0, (), READING, stored=late)])
    assert run.plan.latest is None


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("in the way")
    run = Run(tmp_path, snapshot_steps=10)
    run.chunk(3)
    assert run.taken == []
    assert len(run.notes) == 1
    assert "cannot be made" in run.notes[0]


@pytest.mark.parametrize("in_jupyter", [True, False])
def test_a_snapshot_is_of_the_notebook_or_else_of_the_folder_that_the_cells_ran_in(
    in_jupyter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = "/home/me/01_quickstart.ipynb"  # as jupyter_server tells its kernels
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if in_jupyter:
        monkeypatch.setenv("JPY_SESSION_NAME", notebook)
    plan = SnapshotPlan(tmp_path / "own", Policy, print)
    plan.begin(WorkloadInfo("w", 1, 4, 100, 1), 0, None)
    assert plan.order_now(0)
    assert notebook_of(tmp_path / "own") == (notebook if in_jupyter else str(tmp_path))


def test_jupyter_server_tells_kernels_which_notebook_they_are_of() -> None:
    """By a variable that ipykernel reads as well; a release that names it otherwise would mix up snapshots."""
    code = """
import json
from jupyter_server.services.sessions.sessionmanager import SessionManager
from types import SimpleNamespace
own = SimpleNamespace(kernel_manager=SimpleNamespace(cwd_for_path=lambda path: "/home/me"))
print(json.dumps(SessionManager.get_kernel_env(own, "a.ipynb", "a.ipynb").get("JPY_SESSION_NAME")))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == "/home/me/a.ipynb"
