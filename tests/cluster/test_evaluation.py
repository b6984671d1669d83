"""Evaluation on real ranks: exact, beside training, and a rank that cannot leaves none waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import Interrupted, InvalidInput, TrainingFailed
from tests.cluster.stop_button import PROMPT_S, Stop
from tests.conftest import SMALL, weights
from tests.tiers import every, first_tier
from tests.timing import in_time, until

pytestmark = pytest.mark.cluster

PLAIN = f"""
from gpumem_nb.workloads.digits import Digits
from gpumem_nb.workloads.catalog import mean_cross_entropy
held_out = Digits({SMALL["resolution"]}, train=False)
batch = torch.utils.data.default_collate([held_out[index] for index in range(len(held_out))])
with torch.no_grad():
    model.eval()
    plain = float(mean_cross_entropy(model, batch)), int((model(batch[0]).argmax(1) == batch[1]).sum())
    model.train()
plain
"""

OWN = """
import time
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
rows = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
few = torch.utils.data.Subset(rows, [0])
trouble = None
def metric(model, batch):
    global trouble
    if rank == 0 and trouble == "raises":
        raise ValueError("no such label")
    if rank == 0 and trouble == "memory":
        torch.empty(2**30)
    if rank == 0 and trouble == "once":
        trouble = None
        open(reached, "w").close()
        time.sleep(1000)
    return 1.0
"""


@pytest.fixture
def reached(tmp_path: Path) -> Path:
    """A file that is there once a rank sleeps in the metric."""
    return tmp_path / "reached"


@pytest.fixture
def own(two_ranks: Session, reached: Path) -> Iterator[Session]:
    """A model of somebody's own with one sample to validate on, which rank 0 gets."""
    two_ranks.run(f"{OWN}\nreached = {str(reached)!r}")
    two_ranks.run("criterion = nn.CrossEntropyLoss()")
    two_ranks.attach(model="net", loss="criterion", data="rows", eval_data="few", metric="metric")
    yield two_ranks
    two_ranks.set(eval_every="never", stall_limit_s=30)


def test_the_ready_made_digits_are_evaluated_exactly_beside_training(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.set(batch_size=16, eval_every=5)
    run = session.train(11)
    assert [evaluation.step for evaluation in run.evaluations] == [5, 10]
    assert run.steps == 11
    assert str(run.evaluations[-1]) in str(run)
    assert [event.step for event in session.history.events if event.kind == "eval"][-2:] == [5, 10]
    session.set(eval_every="never")
    found = session.evaluate()
    [loss, right], other = session.run(PLAIN)
    assert other == (loss, right)
    assert (found.step, found.samples) == (11, 297)
    assert math.isclose(found.loss, loss, rel_tol=1e-5)
    assert math.isclose(found.metrics["accuracy"], right / 297, rel_tol=1e-9)
    assert session.history.evaluations[-1] == found
    session.play()
    until(lambda: session.history.steps > 11)
    while_training = session.evaluate()
    assert while_training.step >= 12
    assert session.playing
    until(lambda: session.history.steps > while_training.step)
    session.pause()
    assert len(weights(session)) == 1


@pytest.mark.parametrize(
    ("trouble", "why"), first_tier([("raises", "no such label"), ("memory", "ran out of memory")], every(2))
)
def test_a_rank_that_cannot_evaluate_is_named_and_leaves_none_waiting(own: Session, trouble: str, why: str) -> None:
    assert own.evaluate().samples == 1
    own.run(f"trouble = {trouble!r}")
    with pytest.raises(TrainingFailed, match=f"rank 0 .*in the evaluation.*{why}|rank 0 {why} in the evaluation"):
        own.evaluate()
    own.set(eval_every=2)
    with pytest.raises(TrainingFailed, match="eval_every=never"):
        own.train(5)
    assert own.history.steps == 2
    own.run("trouble = None")
    assert own.doctor().findings[0].cause == "training paused"
    assert own.train(3).evaluations[-1].step == 4
    assert "training paused" not in [one.cause for one in own.doctor().findings]
    assert len(weights(own)) == 1


def test_a_metric_that_runs_away_to_both_sides_is_not_a_number_and_training_goes_on(own: Session) -> None:
    own.run("def metric(model, batch):\n    return (1 - 2 * rank) * float('inf')")
    own.attach(model="net", loss="criterion", data="rows", eval_data="rows", metric="metric")
    own.set(eval_every=2)
    run = own.train(5)
    assert run.steps == 5
    assert [math.isnan(one.metrics["metric"]) for one in run.evaluations] == [True, True]


def test_the_stop_button_ends_an_evaluation(own: Session, reached: Path) -> None:
    own.run("trouble = 'once'")
    stop = Stop(reached.exists)
    with pytest.raises(Interrupted, match="are ready"):
        own.evaluate()
    assert in_time(stop.took_s(), PROMPT_S)
    assert own.evaluate().samples == 1
    assert own.train(1).steps == 1
    assert len(weights(own)) == 1


@pytest.mark.full
def test_a_rank_that_hangs_in_an_evaluation_is_freed_and_named(own: Session) -> None:
    own.set(stall_limit_s=2)  # ranks say what they are at once a second
    own.run("trouble = 'once'")
    with pytest.raises(TrainingFailed, match=r"Rank 0 .*in the evaluation after step 0.*rank 1 waited"):
        own.evaluate()
    assert own.evaluate().metrics == {"metric": 1.0}
    assert own.train(1).steps == 1
    assert len(weights(own)) == 1


def test_without_validation_data_it_is_said_what_to_give(own: Session) -> None:
    own.attach(model="net", loss="criterion", data="rows")
    for ask in (own.evaluate, lambda: own.set(eval_every=10)):
        with pytest.raises(InvalidInput, match=r"net has no validation data\. Name some: .*eval_data=val_set"):
            ask()
    own.run("held = rows if rank else few")
    with pytest.raises(Exception, match="validation data of different lengths"):
        own.attach(model="net", loss="criterion", data="rows", eval_data="held")
    own.run("held = [(torch.full((8,), float(rank)), 0) for _ in range(20)]")
    with pytest.raises(Exception, match="different validation data: samples of one"):
        own.attach(model="net", loss="criterion", data="rows", eval_data="held")
    own.run(
        """
class Noisy(torch.utils.data.Dataset):
    own = torch.Generator()
    def __len__(self):
        return 20
    def __getitem__(self, index):
        return torch.zeros(8) + (rank and torch.rand((), generator=self.own)), 0
held = Noisy()
"""
    )
    own.attach(model="net", loss="criterion", data="rows", eval_data="held")  # rank 1's cannot be compared
