"""What is compared: process trees that train on demand and stand still while another one is measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import start_new_kernel

from gpumem_nb.cluster.launchers.mpi import environment
from gpumem_nb.install.mpi_tools import require_tool
from gpumem_nb.shared.processes import cores
from tests.kernels import kernel_pid

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120


class Side:
    """A process and everything below it. Made running; :meth:`freeze` and :meth:`thaw` stop and continue all of it."""

    name = ""
    process: psutil.Process

    def train(self, steps: int) -> float:
        """Train that many steps and return samples/s of all ranks, without the first tenth."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Take no more time of any core: even idle ranks poll for each other."""
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        """Go on."""
        for process in reversed(self._tree()):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Running inside, frozen after."""
        self.thaw()
        try:
            yield
        finally:
            self.freeze()

    def _tree(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


class Script(Side):
    """A plain script, on several ranks under mpiexec or in one process."""

    def __init__(self, name: str, module: str, ranks: int | None, *arguments: str, **variables: str | None) -> None:
        """Start it; ``variables`` are set in its environment, or with ``None`` taken from it."""
        self.name = name
        wanted = rank_environment(ranks or 1) | variables
        command = [sys.executable, "-m", f"tests.bench.{module}", *arguments, "--follow"]
        if ranks:
            command = [str(require_tool("mpiexec")), "-n", str(ranks), *command]
        self._popen = subprocess.Popen(
            command,
            cwd=ROOT,
            env={variable: value for variable, value in wanted.items() if value is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.process = psutil.Process(self._popen.pid)

    def train(self, steps: int) -> float:
        """Ask rank 0 and wait for its line."""
        self._ask(steps)
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self._popen.wait()}")
        return float(json.loads(line)["samples_per_s"])

    def close(self) -> None:
        """Let it end by itself; kill what does not."""
        self.thaw()
        tree = self._tree()
        with suppress(OSError):
            self._ask(0)
        _, alive = psutil.wait_procs(tree, timeout=10)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]

    def _ask(self, steps: int) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{steps}\n")
        self._popen.stdin.flush()


class Notebook(Side):
    """The toolkit as people use it: a session with its panel open, inside a real Jupyter kernel.

    Attributes:
        kernel_share: of a core, that the kernel took while it trained last.
    """

    name = "live"
    kernel_share = 0.0

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")
        self.process = psutil.Process(kernel_pid(self.manager))
        self.run("import time, gpumem_nb, gpumem_nb.session as sessions; from IPython.display import display")
        self.run("%load_ext gpumem_nb")
        # Imported once here: the first frame must not pay for pandas.
        self.run("import pandas, ipywidgets, plotly.graph_objects")

    def run(self, code: str, value: str | None = None) -> Any:
        """Run a cell; the value of a Python expression after it, if one is given."""
        expressions = {"value": f"__import__('json').dumps({value})"} if value else {}
        reply = self.client.execute_interactive(
            code, user_expressions=expressions, output_hook=lambda message: None, timeout=TIMEOUT_S
        )["content"]
        if reply["status"] != "ok":
            raise RuntimeError(f"{code}: {reply['ename']}: {reply['evalue']}")
        if value is None:
            return None
        answer = reply["user_expressions"]["value"]
        if answer["status"] != "ok":
            raise RuntimeError(f"{value}: {answer['ename']}: {answer['evalue']}")
        return json.loads(answer["data"]["text/plain"][1:-1])

    def start(self, ranks: int) -> float:
        """Start ranks; the seconds it took."""
        code = f"began = time.perf_counter(); session = sessions.start({ranks}, memory_limit='2GiB')"
        return float(self.run(f"{code}; took = time.perf_counter() - began", "took"))

    def train(self, steps: int) -> float:
        """Train with the panel open."""
        skipped = max(1, round(steps * 0.1))
        self.run(
            f"began = time.perf_counter(), time.process_time(); run = session.train({steps}); "
            "share = (time.process_time() - began[1]) / (time.perf_counter() - began[0]); "
            "run = run.frame(); run = run[run['rank'] == 0]; "
            f"took = run.time_s.iloc[-1] - run.time_s.iloc[{skipped} - 1]; "
            f"rate = {steps - skipped} * run.batch_size.iloc[0] * run.accumulation_steps.iloc[0] * session.size / took"
        )
        self.kernel_share = self.run("", "share")
        return float(self.run("", "float(rate)"))

    def close(self) -> None:
        """Stop the session and the kernel."""
        self.thaw()
        tree = self._tree()
        with suppress(RuntimeError, TimeoutError):
            self.manager.interrupt_kernel()
            self.run("session.stop()")
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        _, alive = psutil.wait_procs(tree, timeout=5)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def rank_environment(ranks: int) -> dict[str, str]:
    """What the toolkit's ranks find in theirs, and a free port for DistributedDataParallel."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    device = "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"
    threads = max(1, cores() // ranks)
    return os.environ | environment(threads, device) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
