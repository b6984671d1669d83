"""``precision=bf16_weights`` on real ranks: flipped, predicted, rescued, stored, resumed by other numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import GpumemError, InvalidInput, TrainingFailed
from gpumem_nb.shared.settings import Settings
from tests import exported
from tests.cluster.test_shards import FAILS, IN_UPDATE, NO_ROOM
from tests.conftest import ranks, weights

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
NARROW = {"precision": "bf16_weights"}
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.bend, self.norm = nn.Embedding(50, 48), nn.Conv1d(48, 64, 3, padding=1), nn.BatchNorm1d(64)
        self.mix = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 50)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens):
        found = self.norm(self.bend(self.table(tokens).transpose(1, 2))).transpose(1, 2)
        for layer in self.mix:
            found = found + self.drop(layer(found).relu())
        return self.head(found)


torch.manual_seed(5)
net = Net()
rows = torch.utils.data.TensorDataset(torch.randint(0, 50, (96, 12)))
held = torch.utils.data.TensorDataset(torch.randint(0, 50, (20, 12)))
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())
"""
TYPES = "sorted({str(p.dtype) for p in net.parameters()}), {str(b.dtype) for b in net.buffers()} >= {'torch.float32'}"


def loaded(session: Session, **knobs: Any) -> Session:
    session.run(MODEL)
    session.attach(model="net", data="rows", loss="loss", eval_data="held")
    session.set(**Settings(batch_size=4, bucket_mib=1, **knobs).changed_from(session.settings))
    return session


def losses(session: Session, steps: int) -> list[float]:
    return list(exported.mean_losses(session.train(steps)).values())


def test_a_live_model_is_flipped_both_ways_and_needs_what_was_predicted(two_ranks: Session) -> None:
    session = loaded(two_ranks)
    losses(session, 3)
    for precision in ("bf16_weights", "bf16", "bf16_weights", "fp32"):
        before = weights(session)
        predicted = session.predict(precision=precision)
        assert weights(session) == before
        session.set(precision=precision)
        assert all(map(sound, losses(session, 3)))
        travelling = 2**18  # fp32 copies of all gradients: how many are on their way at the peak is a matter of time
        assert session.history.tried[-1].peak_bytes == pytest.approx(predicted.live_peak_bytes, abs=travelling)
        narrow = ["torch.bfloat16", "torch.float32"] if precision == "bf16_weights" else ["torch.float32"]
        assert session.run(TYPES) == [(narrow, True)] * 2
        assert len(weights(session)) == 1
        session.evaluate()


def sound(loss: float) -> bool:
    return loss == loss and abs(loss) < 100


@pytest.mark.full
def test_a_step_that_runs_out_of_memory_in_the_update_leaves_no_trace(two_ranks: Session) -> None:
    session = loaded(two_ranks, **NARROW)
    expected = losses(session, 6)
    fingerprint = weights(session)
    session = loaded(two_ranks, **NARROW)
    found = losses(session, 3)
    before = weights(session)
    session.run(FAILS.format(what=NO_ROOM, where=IN_UPDATE))
    with pytest.raises(TrainingFailed, match=r"rank 1 .* in the update part of the step"):
        session.train(3)
    assert weights(session) == before
    assert found + losses(session, 3) == expected
    assert weights(session) == fingerprint


def test_a_flip_under_which_no_step_fits_leaves_the_fp32_weights_to_the_bit(two_ranks: Session) -> None:
    session = loaded(two_ranks)
    session.train(4)
    fingerprint = weights(session)
    session = loaded(two_ranks)
    session.train(3)
    before = weights(session)
    session.set(**NARROW)
    assert weights(session) != before
    session.run(FAILS.format(what=NO_ROOM, where="import torch.nn.functional as it; holder, name = it, 'embedding'"))
    session.train(1)
    assert session.settings.precision == "fp32"
    assert weights(session) == fingerprint


def test_a_state_goes_on_to_the_bit_also_in_a_session_in_fp32_and_the_other_way_round(
    two_ranks: Session, tmp_path: Path
) -> None:
    session = loaded(two_ranks, **NARROW)
    losses(session, 3)
    session.save(tmp_path / "narrow")
    expected = losses(session, 3)
    fingerprint = weights(session)
    session = loaded(two_ranks)
    losses(session, 1)
    session.save(tmp_path / "wide")
    wide = losses(session, 2)
    session.resume(tmp_path / "narrow")
    assert session.settings.precision == "bf16_weights"
    assert losses(session, 3) == expected
    assert weights(session) == fingerprint
    session.resume(tmp_path / "wide")
    assert session.settings.precision == "fp32"
    assert session.run(TYPES)[0][0] == ["torch.float32"]
    assert losses(session, 2) == wide
    session.set(**NARROW)
    losses(session, 1)
    session.run("if rank == 1:\n    with torch.no_grad(): net.head.weight.add_(1)")
    assert len(weights(session)) == 2
    session.sync()
    assert len(weights(session)) == 1
    assert session.run(TYPES)[1][0] == ["torch.bfloat16", "torch.float32"]


@pytest.mark.full
def test_ranks_that_are_started_again_go_on_with_narrow_weights() -> None:
    with gpumem_nb.start(2, device="cpu") as session:
        loaded(session, **NARROW)
        session.set(snapshot_steps=1)
        session.train(3)
        session.pause()
        session.restart()
        assert session.settings.precision == "bf16_weights"
        assert session.run(TYPES)[1][0] == ["torch.bfloat16", "torch.float32"]
        assert all(map(sound, losses(session, 2)))
        session.set(precision="fp32")
        session.train(1)
        assert session.run(TYPES)[1][0] == ["torch.float32"]


def test_what_does_not_go_with_it_is_refused(two_ranks: Session, tmp_path: Path) -> None:
    session = loaded(two_ranks, **NARROW)
    session.train(1)
    with pytest.raises(InvalidInput, match="cannot be used with shard_optimizer=on"):
        session.set(shard_optimizer="on")
    with pytest.raises(GpumemError, match="is not written into scripts"):
        session.export(tmp_path / "train.py")
    session.set(precision="fp32")
    session.run("class Own(torch.optim.SGD): pass\nown = Own(net.parameters(), lr=0.1)")
    session.attach(model="net", data="rows", loss="loss", optimizer="own")
    with pytest.raises(GpumemError, match=r"Own is none of them\. Use precision=bf16 with it"):
        session.predict(**NARROW)
    session.train(1)
    with pytest.raises(TrainingFailed, match=r"Own is none of them(.|\n)*went back to precision=fp32"):
        session.set(**NARROW)
    assert session.run(TYPES)[0][0] == ["torch.float32"]


@pytest.mark.full
def test_a_state_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    session = loaded(ranks(2), **NARROW)
    session.train(3)
    session.save(tmp_path / "state")
    before = weights(session)
    for count in (1, 4):
        session = loaded(ranks(count))
        session.resume(tmp_path / "state")
        assert weights(session) == before
        assert session.settings.precision == "bf16_weights"
        assert all(map(sound, losses(session, 3)))
        assert len(weights(session)) == 1
