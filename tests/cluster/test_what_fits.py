"""What fits, on real ranks: the largest micro-batch of each cell, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.planning.score import Scoreboard
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, NotThisTime
from tests.cluster.doctor_plants import MIB, set_limit
from tests.cluster.test_ledger import STATE
from tests.cluster.test_tuning import DIGITS

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]
# Flips make tensors now and then, which lie in the memory of a virtual GPU: of such steps less is known.
FLIPPED = """
import random, torch
from torch import nn
class Flipped(torch.utils.data.Dataset):
    def __init__(self): self.images = torch.randn(1400, 3, 32, 32)
    def __len__(self): return len(self.images)
    def __getitem__(self, index):
        image = self.images[index]
        return image.flip(-1) if random.random() < 0.5 else image
flipped = Flipped()
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
def loss(model, batch): return model(batch).square().mean()
"""


@pytest.fixture
def little_memory(two_ranks: Session) -> Iterator[None]:
    """The largest micro-batches are small: whole steps of them are taken in all precisions, some of which are slow."""
    set_limit(two_ranks, 60 * MIB)
    yield
    set_limit(two_ranks, 96 * MIB)


@pytest.mark.usefixtures("little_memory")
def test_what_fits_is_the_largest_that_does(
    two_ranks: Session, fresh: Callable[..., Session], shell: InteractiveShell
) -> None:
    session = fresh(two_ranks, "text-gpt", width=32, depth=2, heads=2, sequence_length=64)
    session.set(batch_size=16)
    before = session.run(STATE)
    found = shell.run_line_magic("hvd_what_fits", "")
    assert str(found).startswith("What fits")
    assert [digest for digest, _ in session.run(STATE)] == [digest for digest, _ in before]
    cells = {(cell.precision, cell.checkpointing): cell for cell in found.cells}
    assert len(cells) == 9
    assert cells["fp32", "blocks"].largest > cells["fp32", "none"].largest
    for place in (("fp32", "none"), ("bf16", "blocks")):
        cell = cells[place]
        assert session.predict(**cell.settings.changed_from(session.settings)).verdict == "fits"
        assert cell.all_samples or session.largest_batch(precision=place[0], checkpointing=place[1]) == cell.largest
    frontier = found.frontier
    assert frontier
    fastest = max((cell for cell in found.cells), key=lambda cell: cell.samples_per_s or 0)
    assert fastest in frontier
    found.apply("bf16", "blocks")
    assert session.settings == cells["bf16", "blocks"].settings
    session.train(2)


@pytest.mark.usefixtures("little_memory")
def test_what_runs_fits_whatever_is_predicted(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.run(FLIPPED)
    session.attach("net", "flipped", "loss")
    session.set(batch_size=64)
    session.train(5)
    [cell] = [one for one in session.what_fits().cells if (one.precision, one.checkpointing) == ("fp32", "none")]
    assert cell.largest >= 64
    result = session.tune(seconds=5, knobs=["optimizer_impl"])
    assert result.now is not None
    session.run("torch.manual_seed(3)")
    session.train(1)
    assert session.tune(seconds=5, knobs=["optimizer_impl"]).now is not None, "after a cell, too"


@pytest.mark.full
def test_what_earlier_predictions_missed_is_left_free(
    two_ranks: Session, fresh: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_ranks.run("flipped = None")  # what another test may have left on the ranks would need most of the memory
    session = fresh(two_ranks, **DIGITS)
    monkeypatch.setattr(Scoreboard, "missed", lambda self, version: (0.0, 0.5))
    found = [cell.settings for cell in session.what_fits().cells if cell.settings]
    assert found
    for settings in found[:2]:
        assert session.predict(**settings.changed_from(session.settings)).verdict == "fits"


@pytest.mark.full
def test_what_is_loaded_meanwhile_is_not_mixed_in(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)

    def load(what: str, done: float) -> None:
        if what.startswith("fp32, checkpointing blocks"):
            session.load("text-gpt", width=32, depth=2, heads=2)

    session.set(batch_size=16)
    found = session.what_fits(progress=load)
    assert [(cell.precision, cell.checkpointing) for cell in found.cells] == [("fp32", "none")]
    assert "something was loaded" in str(found)
    with pytest.raises(InvalidInput, match="another workload is loaded now"):
        found.apply("fp32", "none")


@pytest.mark.full
def test_what_fits_is_not_mixed_with_settings_that_come_meanwhile_or_later(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=16)

    def flip(what: str, done: float) -> None:
        if what.startswith("fp32, checkpointing blocks"):
            session.set(accumulation_steps=2)

    found = session.what_fits(progress=flip)
    assert [(cell.precision, cell.checkpointing) for cell in found.cells] == [("fp32", "none")]
    assert "nor are those after it: accumulation_steps changed." in str(found)
    session.set(accumulation_steps=1, optimizer="sgd", learning_rate=0.1)
    with pytest.raises(InvalidInput, match="found before optimizer changed, so it may not fit"):
        found.apply("fp32", "none")
    session.set(optimizer="adamw", learning_rate=1e-3)
    found.apply("fp32", "none")
    assert session.settings.batch_size == found.cells[0].largest


@pytest.mark.full
def test_what_fits_keeps_what_was_found_before_a_restart(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)
    session.set(batch_size=16)
    restarted: list[str] = []

    def restart(what: str, done: float) -> None:
        if what.startswith("fp32, checkpointing blocks") and not restarted:
            restarted.append(what)
            session.restart()

    found = session.what_fits(progress=restart)
    assert [(cell.precision, cell.checkpointing) for cell in found.cells] == [("fp32", "none")]
    assert "The ranks were started again meanwhile" in str(found)
    session.set(accumulation_steps=2)
    with pytest.raises(InvalidInput, match="found before accumulation_steps changed"):
        found.apply("fp32", "none")
    session.set(accumulation_steps=1)
    found.apply("fp32", "none")
    assert session.settings.batch_size == found.cells[0].largest


def test_a_cell_before_anything_was_found_is_no_interrupt(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, **DIGITS)

    def cell(what: str, done: float) -> None:
        session.run("1")

    with pytest.raises(NotThisTime, match="Meanwhile something was loaded, or a cell ran on the ranks"):
        session.what_fits(progress=cell)
