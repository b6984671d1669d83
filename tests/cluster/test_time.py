"""Where the time of a step goes, with real ranks: what somebody's code does with its time is found where it does it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import WorkloadError
from gpumem_nb.shared.step_times import BACKWARD, DATA, FORWARD, PARTS, REDUCTION, UPDATE

pytestmark = pytest.mark.cluster

SLEEP_S = 0.05
MODEL = f"""
import time
from torch import nn
pause = lambda *_: time.sleep({SLEEP_S})
class Rows(torch.utils.data.Dataset):
    slow = False
    def __len__(self):
        return 256
    def __getitem__(self, index):
        if Rows.slow and index % 4 == 0:
            pause()
        return torch.ones(16)
class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        pause()
        return gradient
net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
rows = Rows()
def loss(model, batch):
    return model(batch).square().mean()
"""
PLANTED = {
    DATA: "Rows.slow = True",
    FORWARD: "planted = net[1].register_forward_hook(pause)",
    BACKWARD: "planted = net[1].register_forward_hook(lambda module, args, output: SlowBackward.apply(output))",
    UPDATE: "planted = optimizer.register_step_pre_hook(pause)",
}


@pytest.fixture
def own(two_ranks: Session) -> Session:
    """Somebody's own model, whose steps take a few milliseconds."""
    two_ranks.run_cell(MODEL, title="<model>")
    two_ranks.attach(model="net", loss="loss", data="rows")
    two_ranks.set(batch_size=4, accumulation_steps=1, precision="fp32", checkpointing="none", num_workers=0)
    return two_ranks


def means(session: Session) -> Any:
    """Seconds of each part, a row for each rank."""
    return session.time().frame().set_index("rank")


def test_before_a_step_was_done_it_says_so(own: Session) -> None:
    with pytest.raises(WorkloadError, match="known once a step was done: %hvd_train"):
        own.time()


@pytest.mark.full
@pytest.mark.parametrize("part", PLANTED)
def test_what_is_planted_is_found_in_its_part_of_its_rank(own: Session, part: str) -> None:
    own.run(PLANTED[part], ranks=[1])
    frame = own.train(8).frame()
    parts = [f"{name}_s" for name in PARTS]
    assert all(math.isclose(row[parts].sum(), row.step_s, rel_tol=0.01) for _, row in frame.iterrows())
    mean = means(own)
    assert mean.loc[1, f"{part}_s"] >= SLEEP_S
    for other in {DATA, FORWARD, BACKWARD, UPDATE} - {part}:
        assert mean.loc[1, f"{other}_s"] < SLEEP_S
    assert mean.loc[0, f"{part}_s"] < SLEEP_S
    assert mean.loc[0, f"{REDUCTION}_s"] > 0.5 * SLEEP_S, "the other rank waits"
    assert "Rank 1 is slowest, others wait" in str(own.time())


@pytest.mark.full
@pytest.mark.parametrize(
    ("part", "ranks", "cause", "words", "changes"),
    [
        (DATA, [0, 1], "data", "Waiting for data takes", {"num_workers": 2}),
        (FORWARD, [1], "slow rank", "Rank 1 is slow since step", {}),
        (UPDATE, [0, 1], "update", "optimizer_impl=fused", {"optimizer_impl": "fused"}),
    ],
)
def test_the_verdict_names_what_is_planted_and_what_would_help(
    own: Session, part: str, ranks: list[int], cause: str, words: str, changes: dict[str, Any]
) -> None:
    own.train(24)
    assert own.verdict() is None or own.verdict().cause != cause  # type: ignore[union-attr]
    own.run_cell(PLANTED[part], ranks=ranks)
    own.train(28)
    found = own.verdict()
    assert found
    assert (found.cause, found.changes) == (cause, changes)
    assert words in str(own.time())


@pytest.mark.full
def test_what_backward_hides_of_the_reduction_is_told(two_ranks: Session) -> None:
    two_ranks.run_cell(MODEL, title="<model>")
    two_ranks.run(
        "class Slow(nn.Module):\n    def forward(self, x):\n        return SlowBackward.apply(x)\n"
        "net = nn.Sequential(nn.Linear(16, 2048), Slow(), nn.Linear(2048, 1024), nn.Linear(1024, 1024))"
    )
    two_ranks.attach(model="net", loss="loss", data="rows")
    two_ranks.set(batch_size=4, optimizer="sgd")
    frame = two_ranks.train(6).frame()
    assert (frame.hidden_s <= frame.backward_s).all()
    assert frame.hidden_s.median() > 0.001, "4 MiB travel while the slow part is waited for"
    two_ranks.run("net = nn.Linear(16, 1)")
    two_ranks.attach(model="net", loss="loss", data="rows")
    assert (two_ranks.train(3).frame().hidden_s == 0).all(), "the only bucket travels after backward"


def test_the_latest_step_of_each_rank_lies_beside_the_others(own: Session) -> None:
    own.train(3)
    lanes = own.time(timeline=True).lanes
    assert [(lane.rank, lane.step) for lane in lanes] == [(0, own.history.steps), (1, own.history.steps)]
    for lane in lanes:
        names = [part.name for part in lane.parts if part.name in (FORWARD, BACKWARD, REDUCTION, UPDATE)]
        assert list(dict.fromkeys(names)) == [FORWARD, BACKWARD, REDUCTION, UPDATE]
        assert all(one.ended_s == after.began_s for one, after in zip(lane.parts, lane.parts[1:], strict=False))
        assert lane.transfers
    begins = [lane.parts[0].began_s for lane in lanes]
    ends = [lane.parts[-1].ended_s for lane in lanes]
    assert max(begins) < min(ends), "both took it at the same time"
    first, second = ([lap.bucket for lap in lane.transfers] for lane in lanes)
    assert sorted(first) == sorted(second), "each bucket is on both"  # type: ignore[type-var]


@pytest.mark.full
def test_a_rank_that_waits_leaves_its_core_to_others(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.train(2)
    session.run("import time\nslow = model.register_forward_pre_hook(lambda *_: time.sleep(0.5))", ranks=[1])
    session.run("import time\nbefore_s = time.thread_time()")
    waited_s = session.train(6).frame().groupby("rank").reduction_s.sum()[0]
    spent_s, _ = session.run("time.thread_time() - before_s")
    session.run("slow.remove()", ranks=[1])
    assert waited_s > 2
    assert spent_s < waited_s / 2, "seconds of a core, with what it computed"
