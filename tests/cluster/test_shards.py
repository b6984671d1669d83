"""``shard_optimizer`` on real ranks: flipped, predicted, rescued, stored and taken up by another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, TrainingFailed, WorkloadError
from gpumem_nb.shared.settings import Settings
from tests import exported, internals
from tests.conftest import ranks, weights
from tests.tiers import every, first_tier

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bend = nn.Conv2d(3, 24, 3, padding=1)
        self.norm = nn.GroupNorm(3, 24)
        self.mix = nn.ModuleList(nn.Linear(24 * 64, 96) for _ in range(5))
        self.frozen = nn.Linear(7, 501)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(9, 11)

    def forward(self, pictures):
        flat = self.norm(self.bend(pictures)).relu().flatten(1)
        return sum(layer(flat) for layer in self.mix)


torch.manual_seed(5)
net = Net().to(memory_format=torch.channels_last)
split = [{"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
         {"params": [p for p in net.parameters() if p.dim() < 2], "lr": 1e-2}]
own = torch.optim.AdamW(split, lr=1e-3, amsgrad=True)
rows = torch.utils.data.TensorDataset(torch.randn(96, 3, 8, 8), torch.randint(0, 96, (96,)))
def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def loaded(session: Session, **knobs: Any) -> Session:
    session.run(MODEL)
    session.attach(model="net", data="rows", loss="loss", optimizer="own")
    now = {"optimizer": "own", "learning_rate": 1e-3, "batch_size": 4, "clip_norm": 0.5, "bucket_mib": 1} | knobs
    session.set(**Settings(**now).changed_from(session.settings))
    return session


def losses(session: Session, steps: int) -> list[float]:
    return list(exported.mean_losses(session.train(steps)).values())


HELD = "sum(t.nbytes for of in own.state.values() for t in of.values() if t.dim())"


def test_a_live_model_is_flipped_both_ways_and_needs_what_was_predicted(two_ranks: Session) -> None:
    session = loaded(two_ranks)
    expected, fingerprint = losses(session, 12), weights(session)
    assert len(fingerprint) == 1

    session = loaded(two_ranks)
    found = losses(session, 3)
    whole, held = session.predict(), session.run(HELD)[0]
    for value in ("on", "off", "on"):
        predicted = session.predict(shard_optimizer=value)
        session.set(shard_optimizer=value)
        found += losses(session, 3)
        assert session.history.tried[-1].peak_bytes == pytest.approx(predicted.live_peak_bytes, rel=1e-3)
        part = pytest.approx(0.5 if value == "on" else 1, rel=0.01)
        assert predicted.categories["optimizer state"] / whole.categories["optimizer state"] == part
        assert all(nbytes / held == part for nbytes in session.run(HELD))
    assert found == expected
    assert weights(session) == fingerprint
    again = session.predict()
    assert again.live_peak_bytes == pytest.approx(session.history.tried[-1].peak_bytes, rel=1e-3)


FAILS = """
import torch
if rank == 1:
    class Once:
        def __init__(self, holder, name):
            self.holder, self.name, self.before = holder, name, getattr(holder, name)
            setattr(holder, name, lambda *args, **more: self(*args, **more))
        def __call__(self, *args, **more):
            setattr(self.holder, self.name, self.before)
            {what}
            return self.before(*args, **more)
    {where}
    Once(holder, name)
"""
NO_ROOM = "torch.empty(2**40)"
IN_UPDATE = "import torch.optim.adam as it; holder, name = it, 'adam'"
IN_GATHER = "import gpumem_nb.engine.step.shards as it; holder, name = it, 'of_weights'"
BETWEEN = "import gpumem_nb.engine.step.partition as it; holder, name = it.Exchange, 'run'"


@pytest.mark.parametrize(
    ("where", "precision"),
    first_tier([(IN_UPDATE, "fp32"), (IN_GATHER, "fp16")], every(2)),
    ids=["update", "gather"],
)
def test_memory_that_runs_out_in_the_update_or_before_weights_are_given_leaves_no_trace(
    two_ranks: Session, where: str, precision: str
) -> None:
    session = loaded(two_ranks, precision=precision)
    expected = losses(session, 6)
    session = loaded(two_ranks, shard_optimizer="on", precision=precision)
    found = losses(session, 3)
    before = weights(session)
    session.run(FAILS.format(what=NO_ROOM, where=where))
    with pytest.raises(TrainingFailed, match=r"rank 1 .* in the update part of the step"):
        session.train(3)
    assert weights(session) == before
    assert len(before) == 1
    assert found + losses(session, 3) == expected
    assert session.settings.shard_optimizer == "on"


LARGE = """
import torch
from torch import nn
torch.manual_seed(1)
net = nn.Sequential(*(nn.Linear(2200, 2200) for _ in range(4)))
rows = torch.utils.data.TensorDataset(torch.randn(64, 2200))
def loss(model, batch):
    return model(batch[0]).square().mean()
"""


@pytest.mark.full
def test_a_model_whose_whole_state_does_not_fit_trains_as_the_card_says() -> None:
    internals.stop_running()
    with gpumem_nb.start(2, device="cpu", memory_limit="300MiB") as session:
        session.run(LARGE)
        session.attach(model="net", data="rows", loss="loss")
        session.set(batch_size=2, optimizer_impl="fused")
        # How many others are tried besides depends on the time that there is.
        with pytest.raises(TrainingFailed, match=r"ran out of memory(.|\n)*shard_optimizer=on \(live peak"):
            session.train(3)
        predicted = session.predict(shard_optimizer="on")
        session.set(shard_optimizer="on")
        session.train(3)
        assert session.history.tried[-1].peak_bytes == pytest.approx(predicted.live_peak_bytes, rel=1e-3)
        assert len(weights(session)) == 1


@pytest.fixture
def impatient(two_ranks: Session) -> Iterator[Session]:
    two_ranks.set(stall_limit_s=2)
    yield two_ranks
    two_ranks.set(stall_limit_s=30)


@pytest.mark.full
def test_ranks_that_come_apart_while_weights_are_given_go_on_alike(impatient: Session) -> None:
    session = loaded(impatient, shard_optimizer="on")
    expected, fingerprint = losses(session, 6), weights(session)
    session = loaded(impatient, shard_optimizer="on")
    found = losses(session, 2)
    session.run(FAILS.format(what="import time; time.sleep(5)", where=BETWEEN))
    with pytest.raises(TrainingFailed, match="Rank 1 was in the update part of step 3"):
        session.train(4)
    assert found + losses(session, 3) == expected[:2] + expected[3:], "the step that all ranks updated in counts"
    assert weights(session) == fingerprint


@pytest.mark.full
def test_what_cannot_be_shared_is_refused_and_training_goes_back(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = loaded(two_ranks)
    session.run("own = torch.optim.Adafactor(net.parameters())")
    session.attach(model="net", data="rows", loss="loss", optimizer="own")
    session.train(1)
    with pytest.raises(WorkloadError, match=r"Adafactor is none of them\. Use shard_optimizer=off"):
        session.predict(shard_optimizer="on")
    with pytest.raises(TrainingFailed, match=r"Adafactor is none of them(.|\n)*went back to shard_optimizer=off"):
        session.set(shard_optimizer="on")
    assert session.settings.shard_optimizer == "off"
    fresh(two_ranks)
    session.set(shard_optimizer="on")
    with pytest.raises(InvalidInput, match="cannot be used with optimizer=adafactor"):
        session.set(optimizer="adafactor")
    assert "shard_optimizer" in str(session.what_if())


@pytest.mark.full
def test_a_model_that_is_attached_again_goes_on_with_its_whole_state(two_ranks: Session) -> None:
    found = []
    for value in ("off", "on"):
        session = loaded(two_ranks, shard_optimizer=value)
        session.train(3)
        session.attach(model="net", data="rows", loss="loss", optimizer="own")
        session.set(shard_optimizer="off")
        found.append((losses(session, 3), weights(session), session.run(HELD)))
    assert found[0] == found[1]


@pytest.mark.full
def test_a_state_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    saved = {value: tmp_path / value for value in ("off", "on")}
    for value, path in saved.items():
        session = loaded(ranks(2), shard_optimizer=value)
        session.train(3)
        session.save(path)
    for count in (1, 4):
        found = []
        for value, path in saved.items():
            session = loaded(ranks(count))
            session.resume(path)
            assert session.settings.shard_optimizer == (value if count > 1 else "off")
            found.append((losses(session, 3), weights(session)))
        assert found[0] == found[1]
        assert len(found[0][1]) == 1
    session.set(shard_optimizer="on")  # on four
    losses(session, 1)
    session.save(saved["on"])
    session.set(shard_optimizer="off")
    session.save(saved["off"])
    found = []
    for value, path in saved.items():
        session = loaded(ranks(2))
        session.resume(path)
        session.sync()
        assert session.settings.shard_optimizer == value
        found.append((losses(session, 3), weights(session)))
    assert found[0] == found[1]
