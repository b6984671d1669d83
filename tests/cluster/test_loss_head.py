"""``loss_head=chunked`` on real ranks: predicted, flipped on and off, evaluated, resumed, refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, TrainingFailed, WorkloadError
from gpumem_nb.shared.settings import Settings
from tests import exported

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

WORDS = """
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(5)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(3000, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.head = nn.Linear(32, 3000, bias=False)

    def forward(self, words):
        hidden = self.words(words)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def loss(model, batch):
    return cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


def correct(model, batch):
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


net = Net()
tokens = torch.randint(0, 3000, (400, 33))
rows = torch.utils.data.TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())
"""


def mean_losses(run: Any) -> list[float]:
    return list(exported.mean_losses(run).values())


def test_it_frees_what_was_predicted_and_leaves_no_trace(two_ranks: Session, tmp_path: Path) -> None:
    session = two_ranks
    session.run(WORDS)
    session.attach(model="net", data="rows", loss="loss", eval_data="rows", metric="correct")
    session.set(**Settings(batch_size=16).changed_from(session.settings))
    session.train(3)
    whole = session.history.tried[-1].peak_bytes
    assert whole
    session.save(tmp_path / "state")
    expected = mean_losses(session.train(4))
    found = session.evaluate()

    session.resume(tmp_path / "state")
    predicted = session.predict(loss_head="chunked")
    session.set(loss_head="chunked")
    assert mean_losses(session.train(4)) == pytest.approx(expected, rel=1e-5)
    # A gradient more or less is on its way at the peak.
    assert session.history.tried[-1].peak_bytes == pytest.approx(predicted.live_peak_bytes, rel=0.05)
    assert predicted.live_peak_bytes < 0.6 * whole
    assert (now := session.evaluate()).loss == pytest.approx(found.loss, rel=1e-5)
    assert now.metrics == found.metrics
    written = session.export(tmp_path / "train.py")
    assert written.lines < 600
    session.save(tmp_path / "chunked")

    session.set(loss_head="full")
    session.resume(tmp_path / "state")
    assert mean_losses(session.train(4)) == expected
    assert session.history.tried[-1].peak_bytes == pytest.approx(whole, rel=0.05)
    session.resume(tmp_path / "chunked")
    assert session.settings.loss_head == "chunked"


def test_a_loss_that_needs_logits_goes_back_and_small_logits_are_refused(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = two_ranks
    session.run(WORDS)
    session.run("def smooth(model, batch):\n    return -model(batch[0]).log_softmax(-1)[..., 7].mean()")
    session.attach(model="net", data="rows", loss="smooth")
    session.set(**Settings().changed_from(session.settings))
    session.train(1)
    with pytest.raises(WorkloadError, match=r"asks for their log_softmax.*Use loss_head=full"):
        session.predict(loss_head="chunked")
    session.set(loss_head="chunked")
    with pytest.raises(TrainingFailed, match=r"asks for their log_softmax(.|\n)*went back to loss_head=full"):
        session.train(2)
    assert session.settings.loss_head == "full"
    session.run("net.head.register_full_backward_hook(lambda *_: None)")
    session.set(loss_head="chunked")
    with pytest.raises(TrainingFailed, match=r"in the forward part of the step: .* a backward hook of a Linear"):
        session.train(1)
    assert session.settings.loss_head == "full"
    session.train(1)
    fresh(two_ranks, "digits-resnet", width=8, depth=1, resolution=8)
    with pytest.raises(InvalidInput, match="loss_head=chunked frees nothing here"):
        session.set(loss_head="chunked")
