"""Whatever asks what fits gets the same answer, which training then keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, TrainingFailed
from tests.cluster.test_prediction import OWN

pytestmark = [pytest.mark.cluster, pytest.mark.full]

# From 300 samples on it keeps a table of all pairs, which no small step shows.
PAIRS = """
import torch
from torch import nn
class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    def forward(self, x):
        x = self.body(x)
        return x if len(x) < 300 else x + (torch.ones(len(x) * 2**13) * x.sum()).sum() * 0
pairs = Pairs()
vectors = [(torch.randn(32), torch.tensor(index % 8)) for index in range(4096)]
criterion = nn.CrossEntropyLoss()
"""
# Flips make tensors now and then, so that a step lies on no line: small steps say little, whole ones decide.
UNSTEADY = """
import random, torch
from torch import nn
class Flipped(torch.utils.data.Dataset):
    def __init__(self): self.images = torch.randn(1200, 3, 32, 32)
    def __len__(self): return len(self.images)
    def __getitem__(self, index):
        image = self.images[index]
        return image.flip(-1) if random.random() < 0.5 else image
flipped = Flipped()
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
def loss(model, batch): return model(batch).square().mean()
"""


@pytest.fixture(autouse=True)
def room(two_ranks: Session) -> None:
    """Free what the tests before hold on the ranks, whose limit these tests come close to."""
    two_ranks.run("for name in ('pairs', 'flipped', 'wide', 'mixed', 'images', 'net'): globals().pop(name, None)")


@pytest.fixture
def pairs(two_ranks: Session, fresh: Callable[..., Session]) -> Session:
    session = fresh(two_ranks)
    session.run(PAIRS)
    session.attach(model="pairs", loss="criterion", data="vectors")
    session.set(batch_size=32, optimizer="adamw")
    return session


def test_the_largest_batch_is_predicted_to_fit_and_trains(pairs: Session) -> None:
    assert pairs.predict(batch_size=1500).verdict == DOES_NOT_FIT
    largest = pairs.largest_batch()
    assert 300 < largest < 1500
    assert pairs.predict(batch_size=largest).verdict == FITS
    pairs.set(batch_size=largest)
    run = pairs.train(200)
    assert (run.steps, pairs.settings.batch_size) == (200, largest), run.notes


def test_batches_of_other_sizes_before_do_not_make_the_largest_one_fail(two_ranks: Session) -> None:
    """They leave a cache that is cut in other pieces."""
    session = two_ranks
    session.run(OWN + "images = images * 8")
    session.attach(model="mixed", loss="criterion", data="images")
    session.set(precision="fp32", checkpointing="none", batch_size=8, accumulation_steps=1, optimizer="adamw")
    largest = session.largest_batch()
    for size in (largest // 3, 2 * largest, largest * 4 // 5, largest):  # twice as much does not fit
        session.set(batch_size=size)
        run = session.train(3)
    assert (run.steps, session.settings.batch_size) == (3, largest), run.notes


def test_what_small_steps_cannot_say_is_not_none_at_all(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.run(UNSTEADY)
    session.attach("net", "flipped", "loss")
    session.set(batch_size=64)
    largest = session.largest_batch()
    assert largest >= 64, "it trains with 64"
    assert session.predict(batch_size=largest).verdict == FITS
    assert session.largest_batch(precision="bf16") >= 64


# Adam's foreach needs a copy of all weights in the update, whatever the batch.
LARGE_UPDATE = """
from torch import nn
torch.manual_seed(0)
wide = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 8))
rows = [(torch.randn(512), torch.tensor(index % 8)) for index in range(512)]
criterion = nn.CrossEntropyLoss()
"""


@pytest.fixture
def large_update(two_ranks: Session, fresh: Callable[..., Session]) -> Session:
    session = fresh(two_ranks)
    session.run(LARGE_UPDATE)
    session.attach(model="wide", loss="criterion", data="rows")
    return session


def numbers_with_more_than(table: str) -> int:
    return table.count("more than ")


def test_what_ran_out_is_shown_as_a_bound(large_update: Session) -> None:
    session = large_update
    session.set(batch_size=8, optimizer="sgd", fusion_threshold_mib=1)
    foreseen = session.predict(optimizer="adam", optimizer_impl="default")
    if foreseen.lower_bound:
        assert f"more than {foreseen.reserved_peak_bytes / 2**20:.1f} MiB" in str(foreseen)
    table = session.what_if()
    bounds = [one for one in table.flips if one.lower_bound]
    assert numbers_with_more_than(str(table)) == 2 * len(bounds)
    assert set(table.frame().lower_bound) <= {True, False}


def knobs_of(typed: str) -> dict[str, Any]:
    pairs = (part.split("=") for part in typed.split())
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def test_the_command_of_the_card_leads_to_what_was_tried_also_with_the_optimizers_state(two_ranks: Session) -> None:
    """Memory ran out in the very first step, when the optimizer had no state yet."""
    session = two_ranks
    session.run(OWN + "images = images * 4\nmixed.head = nn.Sequential(nn.Linear(12, 3000), nn.Linear(3000, 1000))")
    session.attach(model="mixed", loss="criterion", data="images")
    session.set(precision="fp32", checkpointing="none", batch_size=128, accumulation_steps=1, optimizer="adamw")
    with pytest.raises(TrainingFailed, match="Type %hvd_set") as failed:
        session.train(1)
    trial = session.history.rescue.fitting[0]  # type: ignore[union-attr]
    session.set(**knobs_of(str(failed.value).rsplit("Type %hvd_set ", 1)[1]))
    assert session.settings == trial.settings
    run = session.train(10)
    assert (run.steps, session.settings) == (10, trial.settings), run.notes
    assert run.frame().live_peak_bytes.max() == pytest.approx(trial.peak_bytes, rel=0.02)


def test_the_command_is_typed_from_the_settings_in_force(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "digits-resnet", width=16, depth=6, resolution=16)
    session.set(checkpointing="sqrt")
    session.train(2)
    session.set(checkpointing="none", batch_size=256)
    run = session.train(2)
    assert session.settings.checkpointing == "sqrt", "back to what worked"
    trial = session.history.rescue.fitting[0]  # type: ignore[union-attr]
    session.set(**knobs_of(str(run).rsplit("Type %hvd_set ", 1)[1].splitlines()[0]))
    assert session.settings == trial.settings
    assert session.train(3).frame().live_peak_bytes.max() == pytest.approx(trial.peak_bytes, rel=0.02)


def test_card_doctor_predict_and_tuner_say_the_same(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks, "digits-resnet", width=16, depth=6, resolution=16)
    session.train(2)
    session.set(batch_size=256)
    card = str(session.train(2)).rsplit("Type %hvd_set ", 1)[1].splitlines()[0]
    rescue = session.history.rescue
    assert rescue
    assert rescue.instead
    failed, fastest = rescue.settings, rescue.fitting[0].settings
    first = session.doctor().findings[0]
    assert first.cause == "does not fit"
    assert first.flip
    assert first.flip.after == fastest
    assert rescue.instead.reason(session.settings) in first.do
    too_large = session.predict(**failed.changed_from(session.settings))
    assert str(session.instead(too_large)).endswith(f"Type %hvd_set {card}")
    best = session.tune(seconds=10, global_batch=failed.samples_per_rank * 2).best
    assert best
    assert session.instead(too_large).instead.fastest.settings == best.settings  # type: ignore[union-attr]
    assert session.history.rescue
    assert session.history.rescue.fitting[0].settings == best.settings
    session.run("1 + 1")
    with pytest.raises(InvalidInput, match="predict again"):
        session.instead(too_large)
    with pytest.raises(InvalidInput, match="is not a prediction"):
        session.instead("batch_size=8")  # type: ignore[arg-type]


LONG = """
import torch
from torch import nn
lengths = [16 + 7 * index % 48 for index in range(400)]
lengths[333] = 600
class Texts(torch.utils.data.Dataset):
    def __len__(self): return len(lengths)
    def __getitem__(self, index): return torch.full((lengths[index],), index % 50)
def pad(samples): return nn.utils.rnn.pad_sequence(samples, batch_first=True)
texts = torch.utils.data.DataLoader(Texts(), batch_size=8, collate_fn=pad)
torch.manual_seed(0)
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 48), nn.Linear(48, 50)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(48, 4, 96, batch_first=True) for _ in range(2))
    def forward(self, x):
        x = self.words(x)
        for block in self.blocks: x = block(x)
        return self.head(x)
reader = Reader()
def next_word(model, batch): return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
"""


def test_a_step_that_fails_for_one_long_sample_is_the_one_that_is_tried_and_the_sample_is_named(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.run(LONG)
    session.attach(model="reader", loss="next_word", data="texts")
    session.train(2)
    with pytest.raises(TrainingFailed, match="Sample 333 of the data has 60") as failed:
        session.train(60)
    session.set(**knobs_of(str(failed.value).rsplit("Type %hvd_set ", 1)[1]))
    assert session.train(20).steps == 20, "the long sample is the first"
