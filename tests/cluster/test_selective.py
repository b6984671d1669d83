"""``checkpointing=selective`` on real ranks: predicted, flipped on and off, resumed, and taken home."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, TrainingFailed, WorkloadError
from gpumem_nb.shared.settings import Settings
from tests import exported

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NET = """
from torch import nn
from torch.nn import functional

torch.manual_seed(5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.narrow(functional.silu(self.wide(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def loss(model, batch):
    return (model(batch[0]) - batch[0]).square().mean()


net = Net()
rows = torch.utils.data.TensorDataset(torch.randn(512, 48, 64))
"""


def mean_losses(run: Any) -> list[float]:
    return list(exported.mean_losses(run).values())


def attached(session: Session) -> Session:
    session.run(NET)
    session.attach(model="net", data="rows", loss="loss")
    session.set(**Settings(batch_size=16).changed_from(session.settings))
    return session


def test_the_peak_falls_with_the_budget_as_predicted_and_losses_stay(two_ranks: Session, tmp_path: Path) -> None:
    session = attached(two_ranks)
    session.train(2)
    session.save(tmp_path / "state")
    expected = mean_losses(session.train(3))
    peaks = [session.history.tried[-1].peak_bytes]
    for budget in (0.8, 0.4, 0):
        session.resume(tmp_path / "state")
        predicted = session.predict(checkpointing="selective", activation_budget=budget)
        session.set(activation_budget=budget)
        assert session.settings.checkpointing == "selective"
        assert mean_losses(session.train(3)) == expected
        peaks.append(session.history.tried[-1].peak_bytes)
        # A gradient more or less is on its way at the peak.
        assert peaks[-1] == pytest.approx(predicted.live_peak_bytes, rel=0.02)
    assert all(low and high and low < high for high, low in pairwise(peaks))
    session.save(tmp_path / "selective")
    session.set(checkpointing="none")
    session.resume(tmp_path / "state")
    assert mean_losses(session.train(3)) == expected
    session.resume(tmp_path / "selective")
    assert (session.settings.checkpointing, session.settings.activation_budget) == ("selective", 0)


def test_a_cell_that_changes_a_block_has_it_learned_anew_and_wrong_values_are_refused(two_ranks: Session) -> None:
    session = attached(two_ranks)
    session.set(activation_budget=0.5)
    session.train(2)
    session.run("net.layers[3] = Block()")
    with pytest.raises((TrainingFailed, WorkloadError), match="came into the model after it was attached"):
        session.train(1)
    session.attach(model="net", data="rows", loss="loss")
    session.set(checkpointing="selective")
    assert session.train(2).steps == 2
    with pytest.raises(InvalidInput, match="activation_budget='2' cannot be used: it must be a number from 0 to 1"):
        session.set(activation_budget="2")
    session.run("for layer in net.layers:\n    layer.compile()")
    session.set(checkpointing="none")
    with pytest.raises(TrainingFailed, match=r"torch.compile has joined those of the Block"):
        session.set(checkpointing="selective")
    assert session.settings.checkpointing == "none"


@pytest.mark.full
def test_a_script_keeps_as_much_and_loses_as_much(two_ranks: Session, tmp_path: Path) -> None:
    session = attached(two_ranks)
    session.set(activation_budget=0.4, precision="bf16")
    run = session.train(6)
    session.export(tmp_path / "train.py")
    ran = exported.run(tmp_path / "train.py", steps=6, peaks=True)
    assert list(ran.losses.values()) == mean_losses(run)
    assert max(ran.peaks) == pytest.approx(exported.peak_of(run), rel=0.02)
