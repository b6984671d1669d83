"""Every rank learns that one has failed, in words, whatever state that rank is in: its votes need neither torch's
defaults nor memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import Stalled, TrainingFailed
from tests.cluster.trouble import everything, prepared, same_as
from tests.conftest import about, weights
from tests.internals import COLLECT, DEVICE, LIVE
from tests.tiers import every, first_tier
from tests.timing import in_time

pytestmark = pytest.mark.cluster

PROMPT_S = 10  # far below the usual stall limit, 30 s


@pytest.fixture
def defaults(two_ranks: Session) -> Iterator[Session]:
    """Ranks whose cells may change torch's defaults."""
    yield two_ranks
    two_ranks.run("torch.set_default_dtype(torch.float32)")


@pytest.mark.parametrize(
    "changed",
    first_tier(
        [
            "if rank == 1: torch.set_default_dtype(torch.float64)",
            "torch.set_default_dtype(torch.bfloat16)",
            "torch.set_default_dtype(torch.float64)",
        ],
        every(3),
    ),
    ids=["float64 on one rank", "bfloat16", "float64"],
)
def test_votes_do_not_depend_on_torchs_defaults(defaults: Session, changed: str) -> None:
    session = prepared(defaults, optimizer="own")
    session.train(2)
    session.run(changed)
    assert session.predict(batch_size=32).live_peak_bytes > 0
    assert session.train(2).steps == 2
    assert len(weights(session)) == 1
    before = everything(session)
    session.run("plant('update', 'oom')")
    began_s = time.monotonic()
    with pytest.raises(TrainingFailed, match="rank 1 ran out of memory in the update part"):
        session.train(1)
    assert in_time(time.monotonic() - began_s, PROMPT_S)
    same_as(before, session)
    assert session.train(2).steps == 2


FULL = """
from contextlib import nullcontext
from torch import nn
torch.manual_seed(1)
wide = 1024
net = nn.Sequential(*(nn.Linear(wide, wide, bias=False, dtype=torch.bfloat16) for _ in range(8)))
rows = torch.utils.data.TensorDataset(torch.randn(64, wide).bfloat16())
def size(model, batch):
    return model(batch[0]).float().square().mean()
"""
FILL = f"""
device = {DEVICE}
if rank == 1:
    device.exempt = nullcontext
    device.set_limit(device.reading().reserved_bytes + {{room}} * 2**20)
"""
EMPTY = f"""
if rank == 1:
    del {DEVICE}.exempt
{DEVICE}.set_limit(96 * 2**20)
"""


@pytest.mark.parametrize("room", first_tier([12, 0, 4, 20, 28], every(3)))
def test_a_rank_without_room_for_zeros_says_so(two_ranks: Session, room: int) -> None:
    session = two_ranks
    session.run(FULL)
    session.attach(model="net", data="rows", loss="size")
    session.set(batch_size=2, optimizer="sgd", learning_rate=0.01, bucket_mib=16)  # one, whose copies take 32
    before = weights(session)
    session.run(FILL.format(room=room))
    began_s = time.monotonic()
    try:
        with pytest.raises(TrainingFailed, match=r"rank 1 ran out of memory in the \w+ part of the step"):
            session.train(1)
        assert in_time(time.monotonic() - began_s, PROMPT_S)
    finally:
        session.run(EMPTY)
        session.set(bucket_mib=4)
    assert weights(session) == before
    assert session.train(2).steps == 2
    assert len(weights(session)) == 1


CONTRASTIVE = """
from torch import nn
torch.manual_seed(1)
net = nn.Linear(8, 8)
rows = torch.utils.data.TensorDataset(torch.randn(64, 8))
failing = False
def contrast(model, batch):
    mine = model(batch[0])
    if failing and rank == 1:
        raise ValueError("planted")
    everyone = hvd.allgather(mine.detach(), name="contrast")
    return (mine @ everyone.T).logsumexp(1).mean()
"""


def test_a_rank_that_fails_before_the_losss_own_collective_is_quoted(
    two_ranks: Session, fresh: Callable[..., Session]
) -> None:
    session = fresh(two_ranks)
    session.run(CONTRASTIVE)
    session.attach(model="net", data="rows", loss="contrast")
    session.set(batch_size=4, stall_limit_s=2)
    try:
        session.train(2)
        before = weights(session)
        session.run("failing = True")
        with pytest.raises(TrainingFailed, match=r"rank 1 failed in the forward part of the step.*") as caught:
            session.train(2)
        assert "ValueError: planted" in str(caught.value)
        for ask in (session.predict, session.timeline):  # steps that are undone, recorded or not
            with pytest.raises(Stalled, match=r"rank 1 failed in the forward part of the step.*planted") as stalled:
                ask()
            assert "Rank 0 waited in all-gather 'contrast'" in str(stalled.value)
        session.run("failing = False")
        assert weights(session) == before
        assert session.train(2).steps == 2
    finally:
        session.set(stall_limit_s=30)


def test_horovods_buffer_is_there_before_the_first_step(two_ranks: Session, fresh: Callable[..., Session]) -> None:
    session = fresh(two_ranks)
    session.train(1)
    session.run(COLLECT)
    trained = session.run(LIVE)
    session.run("hvd.shutdown()")  # the ranks join again before the next request
    assert session.run(LIVE) == [about(live) for live in trained]
