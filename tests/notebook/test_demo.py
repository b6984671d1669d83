"""``python -m gpumem_nb.demo`` does what it narrates, and ends cleanly when it is interrupted."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.tiers import every, first_tier
from tests.timing import HANG_S

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(400)]

DEMO = [sys.executable, "-m", "gpumem_nb.demo"]
# They train until they are interrupted.
SMALL_DEMO = """
import sys
from gpumem_nb import demo
demo._flip = lambda session: demo._train(session, 1_000_000)
sys.exit(demo.main())
"""
FLIPS = ("precision fp32 → bf16", "checkpointing none → blocks", "batch_size 32 → 64", "accumulation_steps 1 → 2")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this demo's ranks keep their files: other sessions on this machine have theirs elsewhere."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.full  # the first tier runs the same steps as a notebook
def test_the_demo_trains_flips_and_recovers(temporary: Path) -> None:
    done = subprocess.run(DEMO, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^2 ranks \(.*For another number: %hvd_start 4$", done.stdout, re.MULTILINE)
    assert "20 steps on 2 ranks" in done.stdout
    accuracy = re.search(r"Test accuracy on rank 0: ([\d.]+)%", done.stdout)
    assert accuracy
    assert float(accuracy[1]) > 95
    for flip in FLIPS:
        assert re.search(rf"{flip}: live peak .* MiB → .* MiB \(.*\), .* samples/s", done.stdout), flip
    assert "ran out of memory" in done.stdout
    assert "Recovered: batch_size=16 again" in done.stdout
    assert "1024×1×2" in done.stdout
    assert not list(temporary.glob("gpumem_nb-*"))


@pytest.mark.parametrize(
    "ignored", first_tier([True, False], every(2)), ids=["started in the background of a script", "by hand"]
)
def test_an_interrupt_ends_the_ranks_too(temporary: Path, ignored: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SMALL_DEMO],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignored else None,
    ) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        next(line for line in demo.stdout if "20 steps on 2 ranks" in line)
        started = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate(timeout=HANG_S)
    assert demo.returncode == 130
    assert said.strip().endswith("Interrupted. The ranks are stopped.")
    _, alive = psutil.wait_procs(started, timeout=HANG_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert not list(temporary.glob("gpumem_nb-*"))
