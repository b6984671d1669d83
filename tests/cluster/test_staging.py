"""Horovod's ranks whose gradients travel through memory of their own, as those of GPUs do that reduce on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gpumem_nb.session import Session
from gpumem_nb.shared.errors import TrainingFailed
from tests.cluster.test_link import HERE, promising
from tests.cluster.trouble import everything, prepared, same_as
from tests.conftest import weights
from tests.link_promises import PROMISES, who_leaves_ends_the_wait_of_the_others_and_all_join_again

pytestmark = pytest.mark.cluster
__all__ = ["promising"]
LINK = """
from gpumem_nb.engine.link import communicator
from gpumem_nb.engine.link.horovod import OfHorovod
communicator.use(OfHorovod(staged={}))
"""


@pytest.fixture
def staged(promising: Session) -> Iterator[Session]:
    promising.run(LINK.format(True))
    yield promising
    promising.run(LINK.format(False))


@pytest.mark.parametrize("promise", [promise.__name__ for promise in PROMISES])
def test_the_promises_of_every_link(staged: Session, promise: str) -> None:
    staged.run(f"{promise}({HERE})")


def test_ranks_come_apart_and_join_again(staged: Session) -> None:
    staged.run(f"{who_leaves_ends_the_wait_of_the_others_and_all_join_again.__name__}({HERE})")
    staged.run(f"{PROMISES[0].__name__}({HERE})")


def losses_of(session: Session) -> list[float]:
    """Those of three steps, in the order of steps and ranks."""
    losses: list[float] = session.train(3).frame().sort_values(["step", "rank"]).loss.tolist()
    return losses


def test_training_is_the_same_to_the_bit_also_after_a_failure_and_after_joining_again(
    staged: Session, fresh: Callable[..., Session]
) -> None:
    def train(through_host: bool) -> tuple[list[float], set[str]]:
        session = prepared(staged)
        session.run(LINK.format(through_host))
        losses: list[float] = []
        for knobs in ({}, {"bucket_mib": 0.001}, {"compression": "fp16"}, {"cycle_time_ms": 2}):
            session.set(**knobs)
            losses += losses_of(session)
        before = everything(session)
        session.run("plant('backward', 'oom')")
        with pytest.raises(TrainingFailed, match="rank 1 ran out of memory in the backward part"):
            session.train(2)
        same_as(before, session)
        session.run("hvd.shutdown()")  # the ranks join again before the next request
        losses += losses_of(session)
        session.set(bucket_mib=4, compression="none", cycle_time_ms="default")
        return losses, weights(session)

    through_host, by_itself = train(True), train(False)
    assert through_host == by_itself
    assert len(through_host[1]) == 1
