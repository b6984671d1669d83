"""Proof that the installed Horovod works: two ranks under mpiexec sum a tensor. Nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..shared.errors import SetupError
from .horovod_target import Target
from .long_step import stop_tree
from .mpi_tools import LAUNCH_VARIABLES, require_tool

PROOF_TIMEOUT_S = 120
RANKS = 2


def prove(target: Target) -> None:
    """Run the two-rank all-reduce.

    Raises:
        SetupError: it failed or did not end in time, with the last thing the ranks said.
    """
    command = [str(require_tool("mpiexec")), "-n", str(RANKS), sys.executable, "-m", "gpumem_nb.engine.probe"]
    environment = os.environ | LAUNCH_VARIABLES | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, device_policy(target)],
            env=environment,
            cwd=Path(__file__).parents[2],  # where this package is, installed or not
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(PROOF_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise SetupError(
                f"Two ranks did not finish one all-reduce within {PROOF_TIMEOUT_S} s and were stopped. "
                "A firewall on the loopback interface does this; otherwise rebuild with: "
                "python -m gpumem_nb.install.horovod_build --force"
            ) from None
        finally:
            if process.poll() is None:
                stop_tree(process.pid)
        output.seek(0)
        said = output.read().decode(errors="replace")
    if code:
        raise SetupError(
            f"Horovod is installed, but two ranks could not all-reduce: {reason(said)}. "
            "Rebuild it with: python -m gpumem_nb.install.horovod_build --force"
        )


def device_policy(target: Target) -> str:
    """Return the device of the proof's tensors. NCCL refuses two ranks on one GPU: the CPU path is proven then."""
    if target.gpu == "none":
        return "cpu"
    code = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    devices = int(answer.stdout.strip() or 0) if answer.returncode == 0 else 0
    if devices >= RANKS:
        return "each"
    return "shared" if devices and target.gpu == "staged" else "cpu"


def reason(said: str) -> str:
    """Return the line of the ranks' output that most likely tells why."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "error:" in line or line.startswith("rank ")]
    return (telling or lines or ["they said nothing"])[0].rstrip(".")
