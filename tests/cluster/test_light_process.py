"""No call of a session imports torch into the notebook's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.timing import HANG_S

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(6 * HANG_S)]

EVERY_CALL = """
import sys
from pathlib import Path

import gpumem_nb

folder = Path(sys.argv[1])
session = gpumem_nb.start(2, device="cpu", memory_limit="96MiB")
OWN = "net = torch.nn.Linear(4, 1)\\nrows = [torch.ones(4)] * 64\\nmean = lambda m, batch: m(batch).mean()"
calls = {
    "load": lambda: session.load("digits-resnet", width=8, depth=1, resolution=8),
    "log_to": lambda: session.log_to(folder / "log.jsonl"),
    "train": lambda: session.train(4),
    "play": session.play,
    "pause": session.pause,
    "set": lambda: session.set(batch_size=16, checkpointing="blocks"),
    "train after a flip": lambda: session.train(4),
    "evaluate": session.evaluate,
    "status": session.status,
    "memory": lambda: session.memory(by="module", timeline=True),
    "free": session.free,
    "time": lambda: session.time(timeline=True),
    "verdict": session.verdict,
    "trace": lambda: session.trace(folder / "trace.json", 2),
    "check_sync": session.check_sync,
    "predict": lambda: session.predict(batch_size=8, optimizer="sgd"),
    "predict elsewhere": lambda: session.predict(gpu=["T4-16GB"]),
    "largest_batch": session.largest_batch,
    "peaks_by_batch": session.peaks_by_batch,
    "allocator_what_if": session.allocator_what_if,
    "what_if": session.what_if,
    "what_fits": session.what_fits,
    "tune": lambda: session.tune(seconds=3),
    "doctor": session.doctor,
    "checklist": session.checklist,
    "export": lambda: session.export(folder / "train.py"),
    "save": lambda: session.save(folder / "a.state"),
    "resume": lambda: session.resume(folder / "a.state"),
    "runs": lambda: session.runs.compare(1, 2),
    "report": lambda: session.report(folder / "report.html"),
    "panel": lambda: session.panel().close(),
    "restart": lambda: session.restart().restored,
    "run": lambda: session.run(OWN),
    "attach": lambda: session.attach("net", "rows", "mean"),
    "train what was attached": lambda: session.train(2),
    "sync": session.sync,
    "seed": lambda: session.seed(1),
    "push": lambda: session.push({"number": 1}),
    "pull": lambda: session.pull("number"),
    "export of cells": lambda: session.export(folder / "own.py"),
}
try:
    for name, call in calls.items():
        print(name, flush=True)
        answer = call()
        str(answer)
        getattr(answer, "_repr_html_", str)()
        assert not {"torch", "horovod"} & sys.modules.keys(), name
finally:
    session.stop()
"""


def test_no_call_of_a_session_imports_torch_into_its_process(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", EVERY_CALL, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=5 * HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
