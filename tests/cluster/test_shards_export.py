"""A script whose ranks share the optimizer's state, held against its session bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.session import Session
from tests import exported
from tests.cluster.test_export import passes_ruff

pytestmark = pytest.mark.cluster

STEPS = 6
CELL = """
import torch
from torch import nn
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(32, 70), nn.Tanh(), nn.Linear(70, 90, bias=False), nn.Linear(90, 5))
groups = [{"params": list(net[0].parameters()), "lr": 0.05}, {"params": list(net[1:].parameters())}]
own = torch.optim.Adagrad(groups, lr=0.01)
rows = torch.utils.data.TensorDataset(torch.randn(64, 32), torch.randint(0, 5, (64,)))
cost = nn.CrossEntropyLoss()
"""
CASES: list[tuple[str, dict[str, Any]]] = [
    ("text-gpt", {"batch_size": 3, "accumulation_steps": 2, "clip_norm": 0.5}),
    ("digits-resnet", {"batch_size": 6, "precision": "fp16", "optimizer": "momentum", "compression": "fp16"}),
    ("own", {"optimizer": "own", "batch_size": 4}),
]


@pytest.mark.full
@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize(("name", "knobs"), CASES)
def test_a_script_shares_the_state_too_and_goes_on_from_a_state_of_its_session(
    two_ranks: Session, fresh: Callable[..., Session], tmp_path: Path, name: str, knobs: dict[str, Any], ddp: bool
) -> None:
    if name == "own":
        session = two_ranks
        session.run(CELL)
        session.attach(model="net", data="rows", loss="cost", optimizer="own")
    else:
        small = {"width": 32, "depth": 2, "heads": 2, "sequence_length": 16, "dropout": 0.1}
        session = fresh(two_ranks, name, **(small if "text" in name else {"width": 8, "depth": 1, "resolution": 8}))
    session.set(shard_optimizer="on", **knobs)
    first = session.train(STEPS)
    session.save(tmp_path / "here.state")
    second = session.train(STEPS)
    session.export(tmp_path / "train.py", ddp=ddp)
    assert name == "own" or passes_ruff(tmp_path / "train.py")  # whose cells are as they are
    whole = exported.run(tmp_path / "train.py", steps=2 * STEPS, ddp=ddp)
    resumed = exported.run(tmp_path / "train.py", "--resume", "here.state", steps=2 * STEPS, ddp=ddp)
    assert whole.losses == exported.mean_losses(first) | exported.mean_losses(second)
    assert resumed.losses == exported.mean_losses(second)
    assert exported.differing(session, whole) == exported.differing(session, resumed) == []
