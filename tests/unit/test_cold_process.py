"""The process of a cold prediction: what it leaves behind, and where it can be started."""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import gpumem_nb as gm
from gpumem_nb.planning import dry_process
from gpumem_nb.planning.prediction import Prediction
from tests.timing import HANG_S, until

WIDTH = 16


def rows() -> list[tuple[Tensor, int]]:
    return [(torch.zeros(WIDTH), index % 4) for index in range(8)]


def made() -> nn.Module:
    return nn.Linear(WIDTH, 4)


def predict(data: Callable[[], Any] = rows, model: Callable[[], nn.Module] = made) -> Prediction:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    predicted = gm.predict(gm.Workload("mine", model, data, loss), batch_size=8)
    assert isinstance(predicted, Prediction)
    return predicted


def wait_until_gone(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_what_the_data_have_started_ends_with_the_prediction(tmp_path: Path) -> None:
    noted = tmp_path / "pid"

    def data() -> Any:
        noted.write_text(str(subprocess.Popen(["sleep", str(10 * HANG_S)]).pid))
        return rows()

    assert predict(data).live_peak_bytes
    wait_until_gone(int(noted.read_text()))


@pytest.mark.full
def test_a_helper_that_was_forked_keeps_nobody_waiting(tmp_path: Path) -> None:
    noted = tmp_path / "pid"

    def data() -> Any:
        if (pid := os.fork()) == 0:
            time.sleep(10 * HANG_S)
            os._exit(0)
        noted.write_text(str(pid))
        return rows()

    began_s = time.monotonic()
    assert predict(data).live_peak_bytes
    assert time.monotonic() - began_s < HANG_S
    wait_until_gone(int(noted.read_text()))


@pytest.mark.full
def test_a_thread_that_goes_on_takes_no_answer_away() -> None:
    def data() -> Any:
        threading.Thread(target=time.sleep, args=(HANG_S,)).start()
        return rows()

    began_s = time.monotonic()
    assert predict(data).live_peak_bytes
    assert time.monotonic() - began_s < HANG_S


@pytest.mark.full
def test_paths_of_any_kind_and_a_folder_that_is_gone_are_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", ["", tmp_path, "relative", *map(os.path.abspath, sys.path)])
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert predict().live_peak_bytes


@pytest.mark.full
def test_a_file_with_the_name_of_a_module_of_pythons_own_stops_no_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise OSError('this is not for the process')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert predict().live_peak_bytes


def test_a_module_of_ones_own_is_the_one_that_is_imported_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rlcompleter.py").write_text("from torch import nn\ndef make(): return nn.Linear(16, 4)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "rlcompleter", raising=False)  # Python's own, which IPython uses
    assert predict(model=importlib.import_module("rlcompleter").make).live_peak_bytes
    monkeypatch.delitem(sys.modules, "rlcompleter")


def test_relative_paths_are_those_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", "relative", tmp_path, "/absolute"])
    monkeypatch.chdir(tmp_path)
    found = dry_process._environment(str(tmp_path))["PYTHONPATH"].split(os.pathsep)
    assert found == [str(tmp_path), str(tmp_path / "relative"), "/absolute"]
    assert dry_process._environment(None)["PYTHONPATH"] == "/absolute"


def test_a_process_may_have_no_more_than_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (2**30, 3 * 2**30))
    assert dry_process._most_bytes() == 3 * 2**30
    assert "It may have at most 3.0 GiB of data." in dry_process._ended(1, "MemoryError: no memory")
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (2**30, resource.RLIM_INFINITY))
    assert dry_process._most_bytes() == dry_process.MOST_BYTES
