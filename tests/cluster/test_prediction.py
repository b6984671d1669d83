"""What a flip will need is said before it is made, for models that nobody prepared, and asking changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.kernel.foreground import Foreground
from gpumem_nb.planning.prediction import DOES_NOT_FIT, FITS
from gpumem_nb.session import Session
from gpumem_nb.shared.errors import InvalidInput, NotThisTime, WorkloadError
from gpumem_nb.shared.forecast import MOST_BATCH
from tests.conftest import weights
from tests.tiers import every, first_tier

pytestmark = pytest.mark.cluster

EMPTY = "from gpumem_nb.memory.virtual_gpu.gpu import library; library().gpumem_empty_cache()"
OWN = """
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 12, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(12, 3, 24, batch_first=True) for _ in range(3))
        self.head = nn.Linear(12, 5)
    def forward(self, x):
        x = torch.relu(self.norm(self.down(x))).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

torch.manual_seed(0)
mixed = Mixed()
images = [(torch.randn(3, 16, 16), torch.tensor(index % 5)) for index in range(256)]
criterion = nn.CrossEntropyLoss()
"""
SLOW_S = 0.02  # for each sample
SLOW = f"""
import time
def slow(model, batch):
    time.sleep({SLOW_S} * len(batch[1]))
    return criterion(model(batch[0]), batch[1])
"""


@pytest.fixture
def own(two_ranks: Session) -> Session:
    two_ranks.run(OWN)
    two_ranks.attach(model="mixed", loss="criterion", data="images")
    two_ranks.set(precision="fp32", checkpointing="none", batch_size=8, accumulation_steps=1, optimizer="adamw")
    return two_ranks


def measured(session: Session, **knobs: Any) -> tuple[int, int]:
    """Live and reserved peak of the rank that has most, in the median step after the first under these settings.

    On a busy machine a thread may let go of something so late that it lies beside what the next operator makes, once.
    """
    session.set(**knobs)
    session.train(2)
    session.run(EMPTY)
    steps = session.train(5).frame().groupby("step")
    return int(steps.live_peak_bytes.max().median()), int(steps.reserved_peak_bytes.max().median())


@pytest.mark.parametrize(
    "knobs",
    first_tier(
        [
            {"batch_size": 48, "precision": "bf16"},
            {"batch_size": 32},
            {"batch_size": 16, "accumulation_steps": 3, "optimizer": "momentum"},
            {"batch_size": 3},
            {"batch_size": 32, "checkpointing": "blocks"},
        ],
        every(4),
    ),
    ids=str,
)
def test_a_flip_needs_what_was_predicted(own: Session, knobs: dict[str, Any]) -> None:
    before = own.predict(**knobs)
    live, reserved = measured(own, **knobs)
    assert before.live_peak_bytes == pytest.approx(live, rel=0.01)
    assert before.low_bytes <= reserved <= before.high_bytes
    assert before.verdict == FITS
    assert sum(before.categories.values()) == before.live_peak_bytes


@pytest.mark.full
@pytest.mark.parametrize(
    "knobs", [{"batch_size": 4}, {"batch_size": 16}, {"batch_size": 8, "accumulation_steps": 5}], ids=str
)
def test_throughput_is_that_of_steps_which_are_waited_for(own: Session, knobs: dict[str, Any]) -> None:
    own.run(SLOW)
    own.attach(model="mixed", loss="slow", data="images")
    foreseen = own.predict(**knobs)
    samples = knobs["batch_size"] * knobs.get("accumulation_steps", 1)
    assert foreseen.step_s is not None
    assert SLOW_S <= foreseen.step_s / samples <= 5 * SLOW_S, "sleeping, and on a busy machine some work"
    assert foreseen.samples_per_s == pytest.approx(2 * samples / foreseen.step_s)
    assert foreseen.low_samples_per_s < foreseen.samples_per_s < foreseen.high_samples_per_s


@pytest.mark.full
def test_peaks_by_batch_are_those_of_predictions(own: Session) -> None:
    peaks = own.peaks_by_batch(checkpointing="blocks")
    assert list(peaks) == [2, 4, 8, 16, 32, 64]
    for size in (4, 8, 64):
        assert peaks[size] == own.predict(batch_size=size, checkpointing="blocks").reserved_peak_bytes
    assert list(own.peaks_by_batch(batch_size=100)) == [25, 50, 100, 128], "256 samples on two ranks"
    with pytest.raises(InvalidInput, match="did you mean 'checkpointing'"):
        own.peaks_by_batch(chekpointing="blocks")


def test_what_no_small_step_shows_is_found_by_a_whole_one(own: Session) -> None:
    """A model that keeps more from 32 samples on: small steps say that it fits, a step that is undone knows better."""
    own.run(
        """
class Threshold(Mixed):
    def forward(self, x):
        x = super().forward(x)
        return x + (torch.ones(len(x), 2**22) * x.sum()).sum() * 0 if len(x) >= 32 else x
threshold = Threshold()
"""
    )
    own.attach(model="threshold", loss="criterion", data="images")
    predicted = own.predict(batch_size=32)
    assert predicted.verdict == DOES_NOT_FIT
    assert "ran out of memory" in predicted.basis
    assert own.train(2).steps == 2


def test_what_does_not_fit_has_no_throughput(own: Session) -> None:
    foreseen = own.predict(batch_size=128)
    assert (foreseen.verdict, foreseen.samples_per_s) == (DOES_NOT_FIT, None)


@pytest.mark.full
def test_who_waits_is_not_kept_waiting_for_throughput_and_that_is_said(
    own: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Foreground, "busy", True)
        foreseen = own.predict(batch_size=16)
    assert (foreseen.samples_per_s, foreseen.cut_short) == (None, True)
    foreseen = own.predict(batch_size=16)
    assert foreseen.samples_per_s
    assert not foreseen.cut_short


def test_asking_changes_nothing_that_is_trained(own: Session) -> None:
    losses = own.train(3).frame().groupby("step").loss.mean().tolist()
    own.attach(model="mixed", loss="criterion", data="images")
    own.run(OWN)
    own.attach(model="mixed", loss="criterion", data="images")
    disturbed = []
    for _ in range(3):
        own.predict(batch_size=64, precision="bf16", checkpointing="sqrt", optimizer="sgd")
        disturbed += own.train(1).frame().groupby("step").loss.mean().tolist()
    assert disturbed == losses
    assert len(weights(own)) == 1
    assert own.settings.batch_size == 8


def test_what_does_not_fit_is_said_before_and_the_largest_that_does_fits(own: Session) -> None:
    huge = own.predict(batch_size=128, accumulation_steps=1)
    largest = own.largest_batch()
    if huge.verdict == DOES_NOT_FIT:
        assert largest < 128
    assert own.predict(batch_size=largest).verdict == FITS
    own.set(batch_size=largest)
    assert own.train(2).notes == []


ENDLESS = """
class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(1), torch.zeros(1)
line, endless, nearness = nn.Linear(1, 1), Endless(), nn.MSELoss()
"""


@pytest.mark.full
def test_what_was_predicted_to_fit_is_named_when_memory_runs_out(own: Session) -> None:
    own.run("images = images * 16")
    own.attach(model="mixed", loss="criterion", data="images")
    own.train(1)
    size = int(0.9 * own.largest_batch(checkpointing="blocks"))  # so that a segment more or less does not matter
    assert size > 1.2 * own.largest_batch()
    lighter = own.predict(batch_size=size, checkpointing="blocks")
    assert lighter.verdict == FITS
    own.set(batch_size=size)
    assert own.train(2).notes, "there is a rescue"
    rescue = own.history.rescue
    assert rescue is not None
    assert [(fit.settings, fit.peak_bytes) for fit in rescue.foreseen] == [(lighter.settings, lighter.live_peak_bytes)]


@pytest.mark.full
def test_where_nothing_limits_the_batch_the_end_of_the_search_is_told(own: Session) -> None:
    own.run(ENDLESS)
    own.attach(model="line", loss="nearness", data="endless")
    assert own.largest_batch() == MOST_BATCH
    assert own.largest_batch(accumulation_steps=4) == MOST_BATCH, "each micro-batch may be that large"


@pytest.mark.full
def test_training_goes_on_while_somebody_asks(own: Session) -> None:
    own.play()
    predicted = [own.predict(batch_size=size).live_peak_bytes for size in (16, 32, 64)]
    assert predicted == sorted(predicted)
    assert own.playing
    own.pause()
    assert own.history.rescue is None


@pytest.mark.full
def test_whoever_finds_nobody_waiting_finds_that_the_model_may_have_changed(
    two_ranks: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, changed = [], two_ranks.history.model_may_have_changed

    def seen() -> None:
        busy.append(two_ranks.busy)
        changed()

    monkeypatch.setattr(two_ranks.history, "model_may_have_changed", seen)
    two_ranks.run("1")
    assert busy == [True]
    assert not two_ranks.busy


@pytest.mark.full
def test_every_single_flip_is_in_the_table(own: Session) -> None:
    told: list[tuple[str, float]] = []
    table = own.what_if(progress=lambda what, done: told.append((what, done)))
    assert [what for what, _ in told][:2] == ["as it is", "precision fp32 → fp16"]
    assert len(told) >= len(table.flips) > 5
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert told[-1][1] < 1
    flips = table.frame().set_index("flip")
    assert flips.loc["checkpointing none → blocks"].live_peak_bytes < flips.loc["as it is"].live_peak_bytes
    assert flips.loc["batch_size 8 → 16"].live_peak_bytes > flips.loc["as it is"].live_peak_bytes
    assert flips.loc["checkpointing none → blocks"].mathematics == "keeps"
    assert flips.loc["precision fp32 → bf16"].mathematics == "changes"
    assert "checkpointing none → blocks" in str(table)
    assert own.settings.batch_size == 8


def test_what_cannot_be_predicted_is_a_sentence(own: Session, shell: InteractiveShell) -> None:
    with pytest.raises(InvalidInput, match="did you mean 'precision'"):
        own.predict(precison="bf16")
    with pytest.raises(InvalidInput, match="larger than the dataset"):
        own.predict(batch_size=10_000)
    with pytest.raises(UsageError, match="did you mean 'bf16'"):
        shell.run_line_magic("hvd_predict", "precision=bf61")
    own.run("def broken(outputs, targets):\n    raise ZeroDivisionError('on purpose')\nimages_too = images")
    own.attach(model="mixed", loss="broken", data="images_too")
    with pytest.raises(WorkloadError, match=r"from which larger ones follow, failed: .*on purpose"):
        own.predict()


DIED = """
import os
from torch.utils import data
class Dying:
    def __len__(self):
        return len(images)
    def __getitem__(self, index):
        return images[index] if data.get_worker_info() is None else os._exit(1)
"""


@pytest.mark.full
def test_what_may_go_well_the_next_time_is_told_from_what_will_not(own: Session) -> None:
    own.run("def interrupted(outputs, targets):\n    raise KeyboardInterrupt")
    own.attach(model="mixed", loss="interrupted", data="images")
    with pytest.raises(NotThisTime):
        own.predict()
    own.run(DIED + "dying = Dying()")
    own.attach(model="mixed", loss="criterion", data="dying")
    own.set(batch_size=2, num_workers=1)
    own.train(1)  # the first step of a size is fetched by the ranks themselves
    assert own.predict().samples_per_s, "so is what is undone"


@pytest.mark.full
def test_ranks_that_are_made_alike_may_be_others(own: Session) -> None:
    foreseen = own.predict()
    assert own.foreseen() == foreseen
    own.sync()
    assert own.foreseen() is None


@pytest.mark.full
def test_by_magic(own: Session, shell: InteractiveShell) -> None:
    predicted = shell.run_line_magic("hvd_predict", "batch_size=32 checkpointing=blocks")
    assert str(predicted).startswith("fits: live peak ")
    assert "undone after step" in str(predicted)
    assert " is the largest that fits every rank: live peak " in str(
        shell.run_line_magic("hvd_predict", "--largest-batch")
    )
    assert str(predicted).endswith("; it changes the mathematics (batch_size)")
    assert "keeps to rounding" in str(shell.run_line_magic("hvd_what_if", ""))


@pytest.mark.full
def test_ready_made_models_are_predicted_too(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    for knobs in ({"batch_size": 64}, {"batch_size": 64, "checkpointing": "sqrt", "precision": "bf16"}):
        predicted = session.predict(**knobs)
        live, _ = measured(session, **knobs)
        assert predicted.live_peak_bytes == pytest.approx(live, rel=0.01)


def test_predictions_are_held_against_what_came(own: Session) -> None:
    session = own
    known = len(session.score().scored)  # of the tests before
    session.predict(batch_size=16)
    session.predict(batch_size=24, checkpointing="blocks")  # never made
    session.set(batch_size=16)
    session.train(3)
    *_, one = session.score().scored
    assert len(session.score().scored) == known + 1
    assert one.flip == "batch_size 8 → 16"
    assert one.came.peak_bytes == pytest.approx(one.predicted.live_peak_bytes, rel=0.01)
    assert one.right
    assert abs(session.score().frame().error.iloc[-1]) < 0.01
    assert f"of {known + 1} verdicts right" in str(session.score())


@pytest.mark.full
def test_a_prediction_counts_for_the_model_that_it_was_made_of_and_no_other(own: Session) -> None:
    known = len(own.score().scored)
    own.predict(batch_size=16)
    own.run("mixed.head = nn.Sequential(nn.Linear(12, 4096), nn.Linear(4096, 5))")
    own.attach(model="mixed", loss="criterion", data="images")
    own.set(batch_size=16)
    own.train(2)
    assert len(own.score().scored) == known, "another model under the same name"
    own.predict(batch_size=8)
    own.run("mixed.down.requires_grad_(False)")
    own.set(batch_size=8)
    own.train(2)
    assert len(own.score().scored) == known, "a cell may have changed it"
    own.predict()
    own.train(2)
    assert len(own.score().scored) == known, "it had been tried before"
