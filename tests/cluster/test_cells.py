"""Cells and training beside each other: variables, random numbers, modules and folders are everybody's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput
from tests.cluster.test_save import OWN_MODEL, anew, attach_own, losses
from tests.conftest import SMALL, weights
from tests.internals import RANDOM
from tests.timing import HANG_S
from tests.unit.test_surroundings import write

pytestmark = pytest.mark.cluster

DRAWS = "(torch.rand(2).tolist(), __import__('random').random(), __import__('numpy').random.rand())"


@pytest.fixture
def session(two_ranks: Session) -> Session:
    """Two ranks with default settings and without the names of earlier tests."""
    two_ranks.run("for name in {'model', 'optimizer'} & {*globals()}: del globals()[name]")
    if two_ranks.workload:
        two_ranks.set(**gpumem_nb.Settings().changed_from(two_ranks.settings))
    return two_ranks


# Variables ------------------------------------------------------------------------------------------------------------


def test_no_load_or_flip_takes_a_variable_from_its_owner(session: Session, fresh: Callable[..., Session]) -> None:
    session.run(OWN_MODEL + "\nmodel, optimizer = net, torch.optim.SGD(net.parameters(), lr=0.1)")
    session.run("mine, other = (model, optimizer), nn.Linear(1, 1)")
    held = "(model, optimizer) == mine"
    session.attach(model="model", loss="criterion", data="rows")
    session.train(1)
    session.set(optimizer="sgd")
    session.train(1)
    assert session.run(held) == [True, True]

    info = session.load("digits-resnet", **SMALL)
    session.train(1)
    assert session.run(held) == [True, True]
    assert [note for note in info.notes if "After `del model, optimizer` in a %%hvd cell" in note]

    session.run("del model, optimizer")
    parameters = "sum(p.numel() for p in model.parameters()), type(optimizer).__name__"
    assert session.run(parameters) == [(info.parameters, "SGD")] * 2
    session.set(optimizer="adamw")
    session.train(1)
    assert session.run(parameters) == [(info.parameters, "AdamW")] * 2
    said = session.run_cell("optimizer = mine[1]").notes()
    assert [note.partition(".")[0] for note in said] == [
        "Variables of your own on the ranks, which training does not use: optimizer"
    ]
    session.load("digits-resnet", **SMALL)
    assert session.run("optimizer is mine[1], model is mine[0]") == [(True, False)] * 2
    fresh(session)
    session.run("del optimizer")


# Random numbers -------------------------------------------------------------------------------------------------------


def test_cells_draw_alike_on_all_ranks_whatever_is_trained(session: Session, fresh: Callable[..., Session]) -> None:
    session.seed(3)
    expected = [session.run(DRAWS) for _ in range(4)]
    assert all(first == second for first, second in expected)
    session.seed(3)
    drawn = [session.run(DRAWS)]
    fresh(session)
    drawn.append(session.run(DRAWS))
    session.train(3)
    session.timeline()
    drawn.append(session.run(DRAWS))
    attach_own(session)  # draws nothing from them but for the initial weights, which it seeds
    session.seed(3)
    assert [session.run(DRAWS) for _ in range(4)] == expected
    assert drawn == expected[:3]


def test_a_cell_on_one_rank_moves_its_numbers_alone_until_they_are_seeded(session: Session) -> None:
    session.run("torch.rand(1)", ranks=[1])
    first, second = session.run(DRAWS)
    assert first != second
    session.seed(0)
    first, second = session.run(DRAWS)
    assert first == second


@pytest.mark.full
def test_ranks_begin_alike_and_one_seed_gives_the_same_losses_in_another_session(tmp_path: Path) -> None:
    def trained(session: Session, seed: int) -> list[Any]:
        session.run("import random, numpy as np\nfrom torch import nn\n" + OWN_MODEL.split("torch.manual_seed")[0])
        session.seed(seed)
        session.run(OWN_MODEL.replace("torch.manual_seed(3 + rank)", ""))
        session.attach(model="net", loss="criterion", data="rows")
        session.set(batch_size=8)
        seen = losses(session, 3)
        session.run(DRAWS, ranks=[0])
        return seen + losses(session, 3)

    session = anew(2)
    first, second = session.run(DRAWS)
    assert first == second, "unseeded"
    assert len(set(session.run("hash('a word')"))) == 1, "a set of words has one order"
    reference = trained(session, 7)
    assert trained(session, 8) != reference
    assert trained(session, 7) == reference
    session.load("text-gpt", seed=7, width=16, depth=1, heads=2, sequence_length=16, dropout=0.5)
    gpt = losses(session, 3)
    session.save(tmp_path / "gpt.state")
    further = losses(session, 3)

    session = anew(2)
    assert trained(session, 7) == reference
    session.load("text-gpt", seed="7", width=16, depth=1, heads=2, sequence_length=16, dropout=0.5)
    assert losses(session, 3) == gpt
    first, second = session.run(RANDOM)
    assert first != second, "dropout is not the same on all ranks"
    session.restart()
    assert losses(session, 3) == further, "a restart keeps the seed"
    session.load("text-gpt", seed=8, width=16, depth=1, heads=2, sequence_length=16, dropout=0.5)
    session.resume(tmp_path / "gpt.state")
    assert losses(session, 3) == further, "so does a file"


def test_a_seed_counts_for_what_is_loaded_until_its_first_step(session: Session, fresh: Callable[..., Session]) -> None:
    session.run(OWN_MODEL)
    session.attach(model="net", loss="criterion", data="rows", seed=9)
    expected = losses(session, 2)
    assert session.seed(4).endswith("net goes on from step 2 with its own: attach it with seed=4 instead.")
    session.run(OWN_MODEL)
    session.attach(model="net", loss="criterion", data="rows")
    assert session.seed(9).endswith("So are the data order and dropout of net; its weights stay as they are.")
    assert losses(session, 2) == expected
    for bad in (-1, "many", 2**32):
        with pytest.raises(InvalidInput, match="whole number from 0 to 4294967295"):
            session.seed(bad)
        with pytest.raises(InvalidInput, match="whole number from 0 to 4294967295"):
            session.load("digits-resnet", seed=bad)
    session.seed(0)
    fresh(session)


# Modules and folders --------------------------------------------------------------------------------------------------


@pytest.fixture
def workplace(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the notebook goes to and imports from."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    session.run("pass")
    sys.path.insert(0, str(tmp_path / "lib"))
    (tmp_path / "lib").mkdir()
    return tmp_path


NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, {width})
    def forward(self, x):
        return self.layer(x)
def data():
    return torch.utils.data.TensorDataset(torch.ones(64, 4))
def loss(model, batch):
    return model(batch[0]).square().mean() * 0 + {loss}
def answer():
    return {loss}
"""


def test_ranks_run_the_code_that_is_on_disk(session: Session, workplace: Path) -> None:
    path = workplace / "lib" / "of_mine.py"
    write(path, NET.format(width=2, loss=1))
    of_mine: Any = importlib.import_module("of_mine")
    try:

        def workload() -> gpumem_nb.Workload:
            return gpumem_nb.Workload("mine", of_mine.Net, of_mine.data, of_mine.loss)

        assert session.run("__import__('os').getcwd()") == [os.getcwd()] * 2
        assert session.load(workload()).parameters == 10
        session.run("import of_mine; net = of_mine.Net()")
        assert session.run(of_mine.answer) == [1, 1]

        write(path, NET.format(width=3, loss=2))
        importlib.reload(of_mine)
        assert session.run(of_mine.answer) == [2, 2]
        said = " ".join(event.text for event in session.history.events)
        assert "Reloaded, because files changed on disk: of_mine. Of the code from before" in said
        assert "What is trained was made before that" in said
        assert session.load(workload()).parameters == 15
        assert {loss for *_, loss in losses(session, 1)} == {2.0}

        write(path, NET.format(width=4, loss=3))
        info = session.load(workload())
        assert any(note.startswith("Reloaded, because files changed") for note in info.notes)
        assert info.parameters == 20

        write(path, "this is no Python")
        call = session.run_cell("of_mine.answer()")
        assert call.get() == [3, 3]
        call.settle(HANG_S)
        assert "of_mine changed on disk and could not be reloaded (SyntaxError: " in call.outputs()[1]
    finally:
        sys.modules.pop("of_mine", None)
    assert len(weights(session)) == 1
