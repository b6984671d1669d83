"""``compile=blocks`` on real ranks: predicted, flipped on and off, stored, written into a script, given up together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, TrainingFailed
from gpumem_nb.shared.settings import Settings
from tests import exported
from tests.conftest import ranks, weights

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NET = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x))).sin()))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(200, 64), nn.Linear(64, 200)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, words):
        hidden = self.words(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


torch.manual_seed(5)
net = Net()
tokens = torch.randint(0, 200, (400, 33))
rows = torch.utils.data.TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())
"""
WITHOUT_KERNELS = "import gpumem_nb.engine.replay.compiling as it; it.BACKEND = {}"


def attached(session: Session, **knobs: Any) -> Session:
    session.run(NET)
    session.attach(model="net", data="rows", loss="loss")
    session.set(**Settings(batch_size=16, **knobs).changed_from(session.settings))
    return session


def losses(session: Session, steps: int) -> list[float]:
    return list(exported.mean_losses(session.train(steps)).values())


@pytest.fixture
def quick(two_ranks: Session) -> Iterator[Session]:
    """Ranks that compile without kernels."""
    two_ranks.run(WITHOUT_KERNELS.format("'aot_eager'"))
    yield two_ranks
    two_ranks.run(WITHOUT_KERNELS.format("'inductor'"))


def test_a_live_model_is_flipped_both_ways_and_stored(quick: Session, tmp_path: Path) -> None:
    session = attached(quick)
    session.train(2)
    session.save(tmp_path / "state")
    expected = losses(session, 3)
    plain = session.history.tried[-1].peak_bytes
    session.resume(tmp_path / "state")
    predicted = session.predict(compile="blocks")
    session.set(compile="blocks")
    assert losses(session, 3) == pytest.approx(expected, rel=1e-5)
    assert session.history.tried[-1].peak_bytes == pytest.approx(predicted.live_peak_bytes, rel=0.02)
    assert "compile=blocks compiled 1 graph of 4 blocks in " in str(session.status())
    assert len(weights(session)) == 1
    session.save(tmp_path / "compiled")
    session.set(compile="off")
    session.resume(tmp_path / "state")
    assert losses(session, 3) == expected
    assert session.history.tried[-1].peak_bytes == pytest.approx(plain, rel=0.02)
    assert "compiled" not in str(session.status())
    session.resume(tmp_path / "compiled")
    assert session.settings.compile == "blocks"
    assert session.train(1).steps == 1
    with pytest.raises(InvalidInput, match="compile=blocks joins them"):
        session.set(checkpointing="selective")
    session.run("net.layers[1].compile()")
    with pytest.raises(TrainingFailed, match=r"what torch.compile has compiled already, the Layer\. Use compile=off"):
        session.train(1)


FAILS = """
def fails(graph, inputs):
    raise ValueError("no such kernel")
if rank == 1:
    import gpumem_nb.engine.replay.compiling as it
    it.BACKEND = fails
"""


def test_what_one_rank_cannot_compile_is_given_up_on_all(quick: Session) -> None:
    session = attached(quick)
    expected = losses(session, 4)
    attached(session)
    found = losses(session, 2)
    session.run(FAILS)
    session.set(compile="blocks")
    with pytest.raises(TrainingFailed, match=r"rank 1(.|\n)*no such kernel(.|\n)*went back to compile=off"):
        session.train(2)
    assert session.settings.compile == "off"
    assert found + losses(session, 2) == expected


SLOW = """
import time, torch
def slow(graph, inputs):
    time.sleep(4 if rank == 0 else 7)
    return graph.forward
import gpumem_nb.engine.replay.compiling as it
it.BACKEND = slow
"""


@pytest.mark.full
def test_a_rank_that_compiles_longer_than_the_others_is_no_stall(quick: Session) -> None:
    session = attached(quick)
    session.train(1)
    session.run(SLOW)
    session.set(stall_limit_s=2)
    try:
        session.set(compile="blocks")
        assert session.train(2).steps == 2
        run = session.train(2)
    finally:
        session.set(stall_limit_s=30)
    assert run.steps == 2
    assert session.history.tried[-1].outcome == "ok"


@pytest.mark.full
@pytest.mark.parametrize("knobs", [{}, {"precision": "bf16", "checkpointing": "blocks"}])
def test_a_script_compiles_the_same_blocks(two_ranks: Session, tmp_path: Path, knobs: dict[str, str]) -> None:
    session = attached(two_ranks, **knobs)
    session.set(compile="blocks")
    run = session.train(4)
    session.export(tmp_path / "train.py")
    ran = exported.run(tmp_path / "train.py", steps=4, peaks=True)
    within = 1e-5 if not knobs else 1e-2
    assert list(ran.losses.values()) == pytest.approx(list(exported.mean_losses(run).values()), rel=within)
    assert max(ran.peaks) == pytest.approx(exported.peak_of(run), rel=0.02)


@pytest.mark.full
def test_a_state_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    session = attached(ranks(2), compile="blocks")
    session.train(2)
    session.save(tmp_path / "state")
    found = []
    for value in ("blocks", "off"):
        session = attached(ranks(1))
        session.resume(tmp_path / "state")
        assert session.settings.compile == "blocks"
        session.set(compile=value)
        found.append(losses(session, 3))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.full
def test_the_ladder_has_it_as_a_rung(two_ranks: Session) -> None:
    session = attached(two_ranks)
    session.train(3)
    ladder = session.ladder(same_mathematics=True)
    assert "compile=blocks" in str(ladder)
    assert not ladder.ended
