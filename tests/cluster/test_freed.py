"""Cached memory goes back to the devices when it is asked for, and who holds the rest is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.session import Session
from tests.cluster.test_magics import run
from tests.conftest import weights
from tests.internals import wait_for_steps

pytestmark = pytest.mark.cluster
MIB = 2**20
HOLD = """
import torch
from types import SimpleNamespace
gone = torch.empty(20 * 2**20, dtype=torch.uint8)
outs = [torch.ones(3 * 2**18, requires_grad=True).exp()]
batches = SimpleNamespace(kept={"x": torch.empty(2 * 2**20, dtype=torch.uint8)})
batches.itself = batches
del gone
"""


@pytest.fixture
def freed_session(two_ranks: Session, fresh: Callable[..., Session]) -> Session:
    session = fresh(two_ranks)
    session.train(2)
    session.run(HOLD)
    return session


def test_what_no_tensor_uses_comes_back_and_who_holds_the_rest_is_said(freed_session: Session) -> None:
    session = freed_session
    before = [rank.reading.reserved_bytes for rank in session.memory().ranks]
    report = session.free()
    after = [rank.reading.reserved_bytes for rank in session.memory().ranks]
    assert report.bytes == sum(before) - sum(after) >= 2 * 20 * MIB
    frame = report.frame()
    assert list(frame.reserved_bytes) == after
    expected = session.run("sum(p.nbytes for p in model.parameters())")
    assert list(frame.parameters_bytes) == expected
    assert list(frame.optimizer_state_bytes) == pytest.approx([2 * nbytes for nbytes in expected], rel=0.05)
    for variables in frame.variables:
        assert variables == {"outs": 3 * MIB, "batches": 2 * MIB}
    for row in report.records:
        held = [row[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer_state", "other")]
        assert sum(held) + sum(row["variables"].values()) == row["live_bytes"]
    said = str(report)
    assert "variable outs 3.0 MiB" in said
    assert "outs keeps what its backward pass would need, on " in said
    assert "such as: del outs" in said
    session.run("del outs, batches")
    assert session.free().frame().variables.tolist() == [{}, {}]


EVALUATION = """
from torch import nn
net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
rows = torch.utils.data.TensorDataset(torch.randn(64, 64))
def loss(model, batch):
    return model(batch[0]).square().mean()
"""


def test_outputs_that_keep_their_graphs_are_named_by_memory_and_the_doctor(two_ranks: Session) -> None:
    session = two_ranks
    session.run(EVALUATION)
    session.attach(model="net", data="rows", loss="loss")
    session.set(batch_size=4)
    session.train(3)
    assert "Variables of cells" not in str(session.memory()), "neither data nor model are"
    session.run("losses = [net(torch.randn(1024, 64)).mean() for _ in range(8)]")
    try:
        for said in (str(session.memory()), str(session.doctor())):
            assert "losses keeps what a backward pass would need" in said
            assert "torch.no_grad()" in said
            assert "del losses" in said
    finally:
        session.run("del losses")


def test_it_is_freed_while_training_goes_on_by_magic(freed_session: Session, shell: InteractiveShell) -> None:
    freed_session.play()
    wait_for_steps(freed_session, 4)
    assert run(shell, "%hvd_memory --free").bytes >= 0
    assert freed_session.playing
    wait_for_steps(freed_session, freed_session.history.steps + 2)
    freed_session.pause()
    assert len(weights(freed_session)) == 1
    freed_session.run("del outs, batches")
