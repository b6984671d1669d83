"""A disk that is full keeps no ranks from being ended, and leaves nothing where none could be started."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.cluster.launchers import base, ipyparallel_cluster
from gpumem_nb.cluster.launchers.base import Job, Launcher
from gpumem_nb.install import horovod_build, horovod_target
from gpumem_nb.install.mpi_tools import HERE, LAUNCH_VARIABLES, require_tool
from gpumem_nb.shared.cluster_records import FOLDER_PREFIX, Record
from gpumem_nb.shared.errors import StartError
from gpumem_nb.shared.processes import identify
from tests.timing import HANG_S


class Nothing(Launcher):
    """Starts no ranks."""

    engine_set = "local"
    starter_name = "nothing"

    def settings(self, engine_arguments: list[str]) -> dict[str, dict[str, Any]]:
        return {}

    def verdict(self) -> tuple[int, int] | None:
        return None

    def left_host(self) -> str:
        return ""

    def own_lines(self) -> str:
        return ""


JOB = Job(2, 1, "cpu", None, (), "")


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    made = [tmp_path / f"{FOLDER_PREFIX}{name}" for name in ("profile", "shared")]
    for folder in made:
        folder.mkdir()
    monkeypatch.setattr(base, "_make_folders", lambda: tuple(made))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def test_a_start_that_cannot_be_recorded_leaves_no_folders(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Record, "write", full)
    with pytest.raises(StartError, match=r"record of the ranks could not be written .*No space.*XDG_CACHE_HOME"):
        Nothing(JOB)
    assert not any(folder.exists() for folder in folders)


def test_ranks_are_ended_though_nothing_can_be_written(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Nothing(JOB)
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    launcher.starter = who = identify(started.pid)
    assert who
    monkeypatch.setattr(Record, "write", full)
    try:
        launcher.stop(timeout_s=0)
        started.wait(HANG_S)
        assert not who.runs
        assert not any(folder.exists() for folder in folders)
    finally:
        started.kill()


@pytest.mark.parametrize("which", ["ControllerLauncher", "EngineLauncher"])
def test_a_file_with_the_name_of_a_module_of_pythons_own_stops_no_start(which: str, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise OSError('this is not for ranks')")
    (command,) = ipyparallel_cluster.make(1, "local", tmp_path / "profile").config[which].values()
    assert subprocess.run([*command, "--version"], cwd=tmp_path, timeout=HANG_S, check=False).returncode == 0


def test_ranks_stay_here_inside_a_job_of_a_batch_system() -> None:
    job = {"SLURM_JOBID": "7", "SLURM_NODELIST": "here,elsewhere", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NNODES": "2"}
    where = [str(require_tool("mpiexec")), "-n", "2", "uname", "-n"]
    environment = os.environ | LAUNCH_VARIABLES | HERE | job
    told = subprocess.run(where, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False).stdout
    assert told.split() == [os.uname().nodename] * 2


def test_so_do_those_that_prove_horovods_build(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, str] = {}
    monkeypatch.setattr(horovod_build, "run_whole", lambda *_, env, **__: told.update(env) or 0)
    horovod_build.prove(horovod_target.detect("auto", horovod_build.RECIPE))
    assert told.items() >= HERE.items()
