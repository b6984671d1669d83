"""The notebook's process stays light: whatever is asked of a session, torch is not imported into it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpumem_nb.session import Session
from tests.timing import HANG_S

pytestmark = pytest.mark.cluster

ALL_CALLS = """
import os, sys
from contextlib import suppress
from pathlib import Path
import gpumem_nb as gm
from gpumem_nb.session import Session
from gpumem_nb.shared import snapshot_folder

os.chdir(sys.argv[1])
snapshot_folder.root = lambda: Path(sys.argv[1]) / "snapshots"
called = set()

def seen(name, answer):
    called.add(name)
    str(answer), repr(answer)
    if hasattr(answer, "_repr_html_"):
        answer._repr_html_()
    with suppress(NotImplementedError):
        getattr(answer, "frame", lambda: None)()
    assert "torch" not in sys.modules, f"{name} has imported torch"
    return answer

def call(name, *args, **options):
    return seen(name, getattr(session, name)(*args, **options))

seen("check", gm.check())
seen("predict without ranks", gm.predict("digits-resnet", memory="8GiB", width=8, depth=1, resolution=8))
session = seen("start", gm.start(2, device="cpu", memory_limit="256MiB"))
for name in ("logs", "runs", "settings", "policy", "ranks", "doing", "kept", "restored", "history", "workload",
             "busy", "ended", "playing", "runs_version", "size", "wait_report", "waiting_for"):
    seen(name, getattr(session, name))
call("log_to", "log.jsonl")
call("log_to", "runs/a")
call("load", "digits-resnet", width=8, depth=1, resolution=8)
call("seed", 1)
call("run", "import torch; x = torch.ones(3); float(x.sum())")
call("run_cell", "x", result="text")
call("push", {"a": 1})
call("pull", "a")
call("set", batch_size=8)
call("train", 20)
call("step")
call("play")
call("touch")
call("memory", "module", timeline=True)
call("timeline")
call("time", timeline=True)
call("pause")
call("evaluate")
call("pin")
call("status")
call("verdict" if hasattr(session, "verdict") else "bottleneck")
call("predict", batch_size=4)
call("largest_batch")
call("peaks_by_batch")
call("foreseen")
call("what_if")
call("what_fits")
call("allocator_what_if")
call("doctor")
call("checklist")
call("score")
call("tune", seconds=2)
call("scaling", [1, 2], steps=4)
call("check_network")
call("check_sync")
call("sync")
call("trace", "a.json", steps=1)
call("export", "train.py")
call("save", "a.state")
call("load_runs", "a.state")
call("resume", "a.state")
call("snapshots")
call("free")
with session.telling(lambda what, done: None):
    pass
called.add("telling")
session.runs.export("runs.html")
call("report", "report.html")
call("panel")
try:
    session.memory_snapshot("a.pickle")
except gm.InvalidInput as error:
    seen("memory_snapshot", error)
session.run('''
from torch import nn
net = nn.Linear(4, 2)
rows = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
loss = nn.CrossEntropyLoss()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
''')
call("attach", "net", "rows", "loss", "opt")
call("train", 2)
call("export", "attached.py")
call("interrupt")
try:
    session.run("raise RuntimeError(torch.ones(2))")
except gm.RankError as error:
    seen("an error", error)
call("restart")
call("stop_logging")
call("stop")
left = {name for kind in Session.__mro__ for name in vars(kind) if name[0] != "_"} - called
assert not left, f"not called: {left}"
"""


def test_no_call_of_a_session_imports_torch(two_ranks: Session, tmp_path: Path) -> None:
    two_ranks.pause()
    done = subprocess.run(
        [sys.executable, "-c", ALL_CALLS, str(tmp_path)], capture_output=True, text=True, timeout=4 * HANG_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
