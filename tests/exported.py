"""Runs exported scripts in processes that have no gpumem_nb, and holds them against the session that wrote them."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpumem_nb.cluster.launchers import mpi
from gpumem_nb.install.mpi_tools import require_tool
from gpumem_nb.session import Session
from tests.timing import HANG_S

STATE = "{name: tensor.detach().clone() for name, tensor in model.state_dict().items()}"
_SKIPPED_STEPS = 2  # until the optimizer's state is there
_LOSS = re.compile(r"step (\d+): loss (\S+)")
_ALONE = """
import os, runpy, sys
if os.environ.get("PEAK"):
    sys.path.insert(0, os.environ["PEAK"])
    from tests.exported import count_steps
    count_steps()
    sys.path.pop(0)
for name in [*sys.modules]:
    if name.partition(".")[0] in ("gpumem_nb", "tests"):
        del sys.modules[name]
sys.modules["gpumem_nb"] = None
sys.path[0] = os.getcwd()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Ran:
    """What a script printed and wrote.

    ``losses`` by step are means over the ranks; ``peaks`` those of the ranks in bytes, if they were counted.
    """

    losses: dict[int, float]
    weights: dict[str, Any]
    peaks: list[int]
    output: str


def run(
    script: Path,
    *arguments: str,
    steps: int,
    ranks: int = 2,
    ddp: bool = False,
    peaks: bool = False,
    **variables: str,
) -> Ran:
    """Run a script to its end."""
    import torch

    alone, saved = script.parent / "alone.txt", script.parent / "weights.pt"
    alone.write_text(_ALONE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= mpi.environment(1, "cpu") | variables
    for name in ("HOROVOD_FUSION_THRESHOLD", "PYTHONHASHSEED"):  # the script says them
        environment.pop(name)
    environment |= {"PEAK": str(Path(__file__).parents[1])} if peaks else {}
    starter = [str(require_tool("mpiexec")), "-n", str(ranks), sys.executable]
    if ddp:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0"]
        starter = [sys.executable, *torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    told = [*arguments, "--steps", str(steps), "--log-every", "1", "--save", str(saved)]
    command = [*starter, str(alone), script.name, *told]
    answer = subprocess.run(
        command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return Ran(
        losses={int(step): float(loss) for step, loss in _LOSS.findall(answer.stdout)},
        weights=torch.load(saved),
        peaks=[int(peak) for peak in re.findall(r"peak (\d+)", answer.stdout)],
        output=answer.stdout,
    )


def mean_losses(session_run: Any) -> dict[int, float]:
    """Of each step of a session, in the arithmetic in which ranks average: the mean of all ranks' losses."""
    by_step = session_run.frame().groupby("step").loss
    return {int(step): float(sum(map(np.float32, losses)) * np.float32(1 / len(losses))) for step, losses in by_step}


def peak_of(session_run: Any) -> int:
    """The highest live bytes in a step of a session, when it had settled: the median step of the worst rank.

    Horovod's thread works beside the rank's own, so in a rare step what both hold for a moment comes together.
    """
    frame = session_run.frame()
    settled = frame[frame.step > frame.step.min() + _SKIPPED_STEPS]
    return int(settled.groupby("rank").live_peak_bytes.median().max())


def differing(session: Session, ran: Ran) -> list[str]:
    """Names of weights and buffers that are not those of the session, bit for bit."""
    import torch

    there = session.run(STATE, ranks=0)[0]
    assert there.keys() == ran.weights.keys()
    return [name for name, tensor in there.items() if not torch.equal(tensor, ran.weights[name])]


def scripts_train_alike(session: Session, session_run: Any, folder: Path) -> None:
    """Hold both kinds of script to the losses and weights of what a session has trained since its workload began."""
    losses = mean_losses(session_run)
    for ddp in (False, True):
        session.export(folder / "train.py", ddp=ddp)
        ran = run(folder / "train.py", steps=len(losses), ddp=ddp)
        assert ran.losses == losses
        assert not differing(session, ran)


def count_steps() -> None:
    """Let the virtual GPU's allocator count, and print the peak of the median step when the process ends."""
    import atexit

    from torch.optim.optimizer import register_optimizer_step_post_hook

    from gpumem_nb.memory.virtual_gpu.gpu import VirtualGPU

    gpu = VirtualGPU(0)
    gpu.set_limit(None)
    peaks: list[int] = []

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        peaks.append(gpu.reading().live_peak_bytes)
        gpu.reset_peak()

    register_optimizer_step_post_hook(after)
    atexit.register(lambda: print("peak", _usual(peaks), flush=True))


def _usual(peaks: list[int]) -> int:
    # Horovod's optimizer calls the plain one's update in its own: each step is told twice, first with its peak.
    return int(statistics.median(peaks[::2][_SKIPPED_STEPS + 1 :]))
