"""Exported scripts on real ranks, without the toolkit: held against the session that wrote them, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from gpumem_nb import Workload
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from tests import exported
from tests.internals import COLLECT
from tests.tiers import every, first_tier
from tests.timing import HANG_S

pytestmark = pytest.mark.cluster

STEPS = 12
CLASSES = 3


def held_against(session: Session, path: Path, steps: int = STEPS, **options: Any) -> exported.Ran:
    """Train, export, run the script, and compare losses and weights to the last bit."""
    run = session.train(steps)
    session.export(path, ddp=options.get("ddp", False))
    ran = exported.run(path, steps=steps, **options)
    assert ran.losses == exported.mean_losses(run)
    assert exported.differing(session, ran) == []
    return ran


def passes_ruff(path: Path) -> bool:
    """Whether the linter and the formatter have nothing to say."""
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["check", "--isolated", "--line-length", "120", "--select", "E,F,W,I,B,UP,SIM"]
    checked = subprocess.run([*ruff, *rules, str(path)], capture_output=True, text=True, check=False)
    formatting = ["format", "--isolated", "--line-length", "120", "--diff", str(path)]
    formatted = subprocess.run([*ruff, *formatting], capture_output=True, text=True, check=False)
    print(checked.stdout, formatted.stdout)
    return checked.returncode == formatted.returncode == 0


READY_MADE: list[tuple[str, dict[str, Any]]] = [
    (
        "text-gpt",
        {"batch_size": 3, "accumulation_steps": 2, "checkpointing": "sqrt", "clip_norm": 0.5, "precision": "bf16"},
    ),
    ("digits-resnet", {"batch_size": 6, "warmup_steps": 3, "lr_schedule": "cosine", "schedule_steps": 20}),
]


@pytest.mark.parametrize(("name", "knobs"), first_tier(READY_MADE, every(2)))
def test_a_ready_made_workload_trains_alone_as_in_the_session(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, name: str, knobs: dict[str, Any]
) -> None:
    options = {"width": 32, "depth": 3, "heads": 2, "sequence_length": 16, "dropout": 0.1} if "text" in name else {}
    session = fresh(two_ranks, name, **options)
    session.set(fusion_threshold_mib=1, **knobs)
    session.run(COLLECT)
    run = session.train(STEPS)
    written = session.export(tmp_path / "train.py")
    assert written.lines <= 200
    assert "gpumem_nb" not in (tmp_path / "train.py").read_text().partition('"""\n')[2]
    assert passes_ruff(tmp_path / "train.py")
    ran = exported.run(tmp_path / "train.py", steps=STEPS, peaks=True)
    assert ran.losses == exported.mean_losses(run)
    assert exported.differing(session, ran) == []
    assert max(ran.peaks) == pytest.approx(exported.peak_of(run), rel=0.01)
    assert f"validation: loss {session.evaluate().loss:.6g}" in ran.output


@pytest.mark.full
def test_distributed_data_parallel_goes_on_from_a_state_of_the_session(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks, "text-gpt", width=32, depth=2, heads=2, sequence_length=16, dropout=0.1)
    session.set(
        batch_size=4, precision="fp16", compression="fp16", reduction="sum", lr_schedule="linear", schedule_steps=30
    )
    session.train(5)
    session.save(tmp_path / "here.state")
    run = session.train(STEPS)
    for ddp in (True, False):
        session.export(tmp_path / "train.py", ddp=ddp)
        assert passes_ruff(tmp_path / "train.py")
        ran = exported.run(tmp_path / "train.py", "--resume", "here.state", steps=5 + STEPS, ddp=ddp)
        assert ran.losses == exported.mean_losses(run)
        assert exported.differing(session, ran) == []


CELLS = (
    """
import torch
from torch import nn
# What it learns from.
features = torch.randn(40, 6)
labels = features[:, :3].argmax(1)
unused = 5
""",
    "print(features.shape)",
    """
class Noisy(torch.utils.data.Dataset):
    def __len__(self): return len(features)
    def __getitem__(self, index): return features[index] + 0.1 * torch.randn(6), labels[index]
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(self.scale * outputs, targets)
""",
    "torch.randn(3)",
    """
device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).to(device)
criterion = Scaled()
optimizer = torch.optim.AdamW(
    [{"params": net.parameters()}, {"params": criterion.parameters(), "lr": 0.1}], lr=0.01
)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3)
cooling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cooling], [3])
train_set = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
def accuracy(outputs, targets): return (outputs.argmax(-1) == targets).float().mean()
""",
)


@pytest.mark.parametrize("ddp", first_tier([True, False], every(2)))
def test_the_cells_that_defined_what_was_attached_train_alone(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, ddp: bool
) -> None:
    session = fresh(two_ranks)
    session.seed(11)
    for cell in CELLS:
        session.run(cell)
    session.attach("net", "train_set", "criterion", "optimizer", "scheduler", "train_set", "accuracy", seed=3)
    with pytest.raises(WorkloadError, match=r"No script.*%hvd_train 1"):
        session.export(tmp_path / "train.py")
    session.train(5)
    session.save(tmp_path / "here.state")
    run = session.train(STEPS)
    evaluated = session.evaluate().metrics
    script = tmp_path / "train.py"
    session.export(script, ddp=ddp)
    assert "print(features.shape)" not in script.read_text()
    assert "# What it learns from." in script.read_text()
    whole = exported.run(script, steps=5 + STEPS, ddp=ddp)
    resumed = exported.run(script, "--resume", "here.state", steps=5 + STEPS, ddp=ddp)
    for ran in (whole, resumed):
        assert {step: loss for step, loss in ran.losses.items() if step > 5} == exported.mean_losses(run)
        assert f"accuracy {evaluated['accuracy']:.6g}" in ran.output


def make_model() -> nn.Module:
    """Of a module that the script imports."""
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, CLASSES))


@pytest.mark.full
def test_a_workload_of_functions_is_imported_or_written_out(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    features = "torch.randn(30, 4)"
    module = tmp_path / "own_parts.py"
    module.write_text(f"import torch\ndef make_data():\n    x = {features}\n    return x, x[:, :3].argmax(1)\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import own_parts  # type: ignore[import-not-found]

        rate = 0.05
        namespace: dict[str, Any] = {"nn": nn, "torch": torch, "__name__": "__main__", "rate": rate}
        source = (
            "class Head(nn.Linear):\n    def forward(self, features):\n        return 2 * super().forward(features)\n"
            "def model():\n    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), Head(8, 3))\n"
            "loss = lambda net, batch: (\n    nn.functional.cross_entropy(net(batch[0]), batch[1])\n  + rate\n    )\n"
            "optimizer = lambda params: torch.optim.SGD(params, lr=rate)\n"
        )
        import linecache

        linecache.cache["<cell of this test>"] = (len(source), None, source.splitlines(True), "<cell of this test>")
        exec(compile(source, "<cell of this test>", "exec"), namespace)
        parts = (namespace["model"], own_parts.make_data, namespace["loss"], namespace["optimizer"])
        session = fresh(two_ranks)
        session.load(Workload("mine", *parts), seed=4)
        session.set(batch_size=5)
        script = tmp_path / "elsewhere" / "train.py"
        script.parent.mkdir()
        held_against(session, script)
        assert "from own_parts import make_data" in script.read_text()
        assert f"imports that from {tmp_path}" in str(session.export(script))
    finally:
        sys.path.remove(str(tmp_path))


def test_what_cannot_be_exported_is_said_and_nothing_is_written(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session, path = fresh(two_ranks), tmp_path / "train.py"
    session.set(reduction="adasum", optimizer="sgd")
    with pytest.raises(WorkloadError, match=r"adasum.*--ddp.*reduction=average"):
        session.export(path, ddp=True)
    session.export(path)
    before = path.read_text()
    session.export(path)
    assert path.read_text() == before
    path.write_text("print('mine')")
    with pytest.raises(InvalidInput, match="already exists and is not a script that gpumem_nb exported"):
        session.export(path)
    with pytest.raises(InvalidInput, match="no such folder"):
        session.export(tmp_path / "nowhere" / "train.py")
    path.unlink()
    session.set(reduction="average")
    data = TensorDataset(torch.randn(20, 4), torch.zeros(20, dtype=torch.int64))
    session.push({"pushed": data})
    session.run("net = torch.nn.Linear(4, 2)\ndef loss(model, batch): return model(batch[0]).sum()")
    session.attach("net", "pushed", "loss")
    session.train(1)
    with pytest.raises(WorkloadError, match=r"pushed.*from the notebook.*%%hvd cell"):
        session.export(path)
    chosen = (
        "torch.utils.data.DataLoader(rows, batch_size=2, sampler=torch.utils.data.WeightedRandomSampler([1] * 20, 20))"
    )
    session.run(f"rows = [(torch.zeros(4), 0)] * 20\nweighted = {chosen}")
    session.attach("net", "weighted", "loss")
    session.train(1)
    with pytest.raises(WorkloadError, match=r"WeightedRandomSampler.*shuffle=True"):
        session.export(path)
    session.load(
        Workload("mine", make_model, lambda: data, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    )
    session.train(1)
    with pytest.raises(WorkloadError, match=r"data"):
        session.export(path)
    assert not path.exists()


@pytest.mark.full
@pytest.mark.parametrize("ddp", [False, True])
def test_every_command_that_is_told_runs_it_as_a_terminal_does(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, ddp: bool
) -> None:
    written = fresh(two_ranks, "digits-resnet", width=8, depth=1, resolution=8).export(
        tmp_path / "my train.py", ddp=ddp
    )
    lines = str(written).splitlines()
    told = lines[lines.index(f"Run it in a terminal, in {tmp_path}:") + 1 :]
    assert all(command in (tmp_path / "my train.py").read_text() for command in written.commands)
    plain = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    environment = [line for line in told if "activate" in line]
    for command in written.commands:
        terminal = "\n".join(["set -e", *environment, f"{command} --steps 2 --log-every 1"])
        answer = subprocess.run(
            ["bash", "-c", terminal],
            cwd=tmp_path,
            env=plain,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert answer.returncode == 0, command + answer.stdout + answer.stderr
        assert "step 2: loss" in answer.stdout


def test_the_magic_says_what_is_not_carried_over_and_how_to_run_it(
    two_ranks: Session, fresh: Callable[..., Session], shell: InteractiveShell, tmp_path: Path, capsys: Any
) -> None:
    session = fresh(two_ranks)
    session.set(on_bad_sample="skip", on_oom="shrink")
    session.train(2)
    shell.run_line_magic("hvd_export", f"--ddp {tmp_path / 'train.py'}")
    told = capsys.readouterr().out
    assert "on_bad_sample=skip: a sample that cannot be fetched ends the script" in told
    assert "on_oom=shrink" in told
    assert "the 2 steps that were done" in told
    assert "torchrun --nproc-per-node 2 train.py" in told
    session.play()
    written: list[Any] = []
    thread = threading.Thread(target=lambda: written.append(session.export(tmp_path / "train.py")))
    thread.start()
    thread.join(HANG_S)
    session.pause()
    assert "mpiexec -n 2 --bind-to none" in str(written[0])


def test_settings_that_a_load_has_kept_are_exported_before_the_first_step(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks)
    session.set(optimizer="sgd")
    session.load("digits-resnet", width=8, depth=1, resolution=8)
    session.export(tmp_path / "train.py")
    assert "SGD(" in (tmp_path / "train.py").read_text()


@pytest.mark.full
def test_what_autotune_tries_is_not_in_a_script(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path
) -> None:
    session = fresh(two_ranks, "digits-resnet", width=8, depth=1, resolution=8)
    path = tmp_path / "train.py"

    def variables() -> list[str]:
        session.export(path)
        return [line for line in path.read_text().splitlines() if "HOROVOD_" in line]

    session.train(1)
    before = variables()
    session.set(autotune="on")
    session.play()
    try:
        now, there = "__import__('os').environ.get('HOROVOD_CYCLE_TIME')", set[Any]()
        deadline = time.monotonic() + HANG_S
        while len(there) < 3:  # until two of its settings were tried
            assert variables() == before
            there |= set(session.run(now, ranks=0))
            assert time.monotonic() < deadline
    finally:
        session.pause()
        session.set(autotune="off")
