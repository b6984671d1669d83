"""Whether a micro-batch may be trained in parts is found by steps that are undone, and said of every such flip."""

from __future__ import annotations

import pytest

from gpumem_nb.planning.prediction import Prediction
from gpumem_nb.session import Session
from tests.tiers import every, first_tier
from tests.timing import slowness

pytestmark = pytest.mark.cluster

DATA = """
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
rows = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(0, 4, (96,)))
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
def loss(model, b):
"""
LOSSES = {
    "pairs of samples": (
        "z, w = (F.normalize(model(x), dim=1) for x in (b[0], b[0].flip(1)));"
        " return F.cross_entropy(z @ w.T / .5, torch.arange(len(z)))"
    ),
    "a sum": "return F.cross_entropy(model(b[0]), b[1], reduction='sum') / 8",
    "labels that are ignored": "return F.cross_entropy(model(b[0]), b[1].masked_fill(b[1] < 1, -100))",
    "weights of classes": "return F.cross_entropy(model(b[0]), b[1], weight=torch.tensor([.01, .1, 1, 10]))",
}
SPLIT = {"batch_size": 2, "accumulation_steps": 4}


def attached(session: Session, body: str) -> Session:
    session.run(f"{DATA}    {body}")
    session.attach(model="net", data="rows", loss="loss")
    session.set(batch_size=8, accumulation_steps=1, precision="fp32", checkpointing="none")
    session.train(2)
    return session


@pytest.mark.parametrize("body", first_tier(LOSSES.values(), every(4)), ids=LOSSES)
def test_a_loss_that_is_not_a_mean_over_samples_is_noticed(two_ranks: Session, body: str) -> None:
    session = attached(two_ranks, body)
    assert "changes the mathematics (batch_size: the gradient of a micro-batch" in str(session.predict(**SPLIT))
    tuned = session.tune(seconds=5 * slowness())
    assert {one.settings.batch_size for one in tuned.looked_at} == {8}, "it keeps the mathematics"


def test_a_mean_over_samples_is_known_as_one_and_asking_changes_nothing(two_ranks: Session) -> None:
    session = attached(two_ranks, "return F.cross_entropy(model(b[0]), b[1])")
    dry = attached(two_ranks, "return F.cross_entropy(model(b[0]), b[1])").train(3).frame().loss.tolist()
    session = attached(two_ranks, "return F.cross_entropy(model(b[0]), b[1])")
    said = str(session.predict(**SPLIT))
    assert said.endswith("it keeps the mathematics to rounding")
    assert session.run("net.training") == [True, True]
    assert session.train(3).frame().loss.tolist() == dry


def test_what_was_not_asked_for_is_said_as_a_possibility(two_ranks: Session) -> None:
    session = attached(two_ranks, "return F.cross_entropy(model(b[0]), b[1])")
    assert session.splits.mean is None
    session.predict(precision="bf16")
    assert session.splits.mean is None, "no step is taken for it where nothing is split"


@pytest.mark.full
def test_of_a_gpu_that_is_not_here_splits_are_said_to_change_what_they_change(two_ranks: Session) -> None:
    session = attached(two_ranks, LOSSES["pairs of samples"])
    found = session.predict(gpu="T4-16GB", **SPLIT)
    assert isinstance(found, Prediction)
    assert found.splits.mean is False
