"""Two notebooks on one machine: they see each other, and neither can disturb the other."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from jupyter_client.manager import KernelManager

from gpumem_nb.shared import cluster_records
from tests.kernels import kernel_pid
from tests.timing import HANG_S, until

pytestmark = pytest.mark.cluster

START = """
import gpumem_nb
session = gpumem_nb.start(2, device="cpu", memory_limit="96MiB")
session.load("digits-resnet", width=8, depth=1, resolution=8)
"""


class Notebook:
    """A kernel of its own, as JupyterLab starts one."""

    def __init__(self) -> None:
        self._closed = False
        self._manager = KernelManager(kernel_name="python3")
        assert self._manager.kernel_spec is not None
        self._manager.kernel_spec.argv[0] = sys.executable
        self._manager.start_kernel()
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=HANG_S)

    @property
    def pid(self) -> int:
        return kernel_pid(self._manager)

    def run(self, code: str) -> str:
        """What a cell prints; an error in it fails the test."""
        printed: list[str] = []

        def take(message: dict[str, dict[str, str]]) -> None:
            if message["header"]["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                printed.append(message["content"]["text"])

        reply = self._client.execute_interactive(code, timeout=HANG_S, output_hook=take)
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(printed).strip()

    def close(self) -> None:
        """Once, or again to no effect."""
        if self._closed:
            return
        self._closed = True
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=False)
        self._manager.cleanup_resources()


@pytest.fixture
def notebooks() -> Iterator[tuple[Notebook, Notebook]]:
    both = (Notebook(), Notebook())
    yield both
    for notebook in both:
        notebook.close()


def clusters(notebook: Notebook) -> list[cluster_records.Record]:
    return [record for record in cluster_records.others() if record.kernel.pid == notebook.pid]


@pytest.mark.full
def test_two_notebooks_train_side_by_side_and_one_survives_the_other(notebooks: tuple[Notebook, Notebook]) -> None:
    first, second = notebooks
    for notebook in notebooks:
        notebook.run(START)  # before either trains, or the second start would take several times as long
    for notebook in notebooks:
        notebook.run("session.play()")
    limit = "2 ranks (virtual GPUs of 96.0 MiB each); they hold"
    assert f" kernel {second.pid} has {limit}" in first.run("print(session.status())")
    assert f" kernel {first.pid} has {limit}" in second.run("print(session.status())")
    (orphans,), (others,) = clusters(first), clusters(second)
    assert not set(orphans.processes) & set(others.processes)

    steps = int(second.run("print(session.history.steps)"))
    os.kill(first.pid, signal.SIGKILL)
    assert cluster_records.await_end(orphans.processes, timeout_s=HANG_S)
    assert not [folder for folder in orphans.folders if os.path.exists(folder)]
    assert all(who.runs for who in others.processes)
    until(lambda: int(second.run("print(session.history.steps)")) >= steps + 20)
    assert second.run("print(session.playing, session.ended)") == "True"
    assert f"kernel {first.pid} has" not in second.run("print(session.status())")

    # The notebook is closed: its kernel is asked to end, and does not stop the session first.
    second.close()
    assert cluster_records.await_end(others.processes, timeout_s=HANG_S)
    assert not [folder for folder in others.folders if os.path.exists(folder)]
