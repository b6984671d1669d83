"""The process of a cold prediction: what it leaves behind, and where it can be started."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import gpumem_nb as gm
from gpumem_nb.planning.prediction import Prediction
from tests.timing import HANG_S

WIDTH = 16


def rows() -> list[tuple[Tensor, int]]:
    return [(torch.zeros(WIDTH), index % 4) for index in range(8)]


def predict(data: Callable[[], Any] = rows) -> Prediction:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    predicted = gm.predict(gm.Workload("mine", lambda: nn.Linear(WIDTH, 4), data, loss), batch_size=8)
    assert isinstance(predicted, Prediction)
    return predicted


def wait_until_gone(pid: int) -> None:
    until_s = time.monotonic() + 5
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until_s
            time.sleep(0.05)


def test_what_the_data_have_started_ends_with_the_prediction(tmp_path: Path) -> None:
    noted = tmp_path / "pid"

    def data() -> Any:
        noted.write_text(str(subprocess.Popen(["sleep", str(HANG_S)]).pid))
        return rows()

    assert predict(data).live_peak_bytes
    wait_until_gone(int(noted.read_text()))


def test_a_helper_that_was_forked_keeps_nobody_waiting(tmp_path: Path) -> None:
    noted = tmp_path / "pid"

    def data() -> Any:
        if (pid := os.fork()) == 0:
            time.sleep(HANG_S)
            os._exit(0)
        noted.write_text(str(pid))
        return rows()

    began_s = time.monotonic()
    assert predict(data).live_peak_bytes
    assert time.monotonic() - began_s < HANG_S
    wait_until_gone(int(noted.read_text()))


def test_a_thread_that_goes_on_takes_no_answer_away() -> None:
    def data() -> Any:
        threading.Thread(target=time.sleep, args=(HANG_S,)).start()
        return rows()

    began_s = time.monotonic()
    assert predict(data).live_peak_bytes
    assert time.monotonic() - began_s < HANG_S
