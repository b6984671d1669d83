"""Horovod's link between ranks keeps the promises of every link."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpumem_nb
from gpumem_nb.session import Session
from gpumem_nb.shared.processes import cores
from tests import link_promises
from tests.link_promises import PROMISES, who_leaves_ends_the_wait_of_the_others_and_all_join_again

pytestmark = pytest.mark.cluster

CODE = inspect.getsource(link_promises).replace('"""What every', '"""\nWhat every')
HERE = "__import__('gpumem_nb.engine.link.communicator', fromlist=['here']).here()"


@pytest.fixture
def promising(two_ranks: Session) -> Session:
    two_ranks.run(CODE.replace("from __future__ import annotations\n", ""))
    return two_ranks


@pytest.mark.parametrize("promise", [promise.__name__ for promise in PROMISES])
def test_horovods_ranks(promising: Session, promise: str) -> None:
    promising.run(f"{promise}({HERE})")


def test_horovods_ranks_come_apart_and_join_again(promising: Session) -> None:
    promising.run(f"{who_leaves_ends_the_wait_of_the_others_and_all_join_again.__name__}({HERE})")
    promising.run(f"{PROMISES[0].__name__}({HERE})")


@pytest.fixture(scope="module")
def alone() -> Iterator[Session]:
    """A rank by itself."""
    with gpumem_nb.start(1, device="cpu", threads=2) as session:
        yield session


@pytest.mark.skipif(cores() < 2, reason="torch takes no more threads than there are cores")
def test_work_too_small_to_be_shared_is_done_by_one_of_a_ranks_threads(alone: Session) -> None:
    def threads() -> list[int]:
        import torch

        counts = []
        for elements in (1, 256, 2**20):
            torch.ones(elements).sqrt()
            counts.append(len(os.listdir("/proc/self/task")))
        return counts

    [[none, few, many]] = alone.run(threads)
    assert (few - none, many - none) == (0, 1)


@pytest.mark.full
def test_horovods_thread_of_a_rank_by_itself_is_seldom_awake_and_serves_cells(alone: Session) -> None:
    def awake() -> tuple[float, int]:
        from gpumem_nb.engine.link.collectives import NICENESS

        own = [number for number in os.listdir("/proc/self/task") if os.getpriority(0, int(number)) == NICENESS]
        switches = (Path(f"/proc/self/task/{number}/schedstat").read_text().split()[2] for number in own)
        return time.monotonic(), sum(map(int, switches))

    [(before_s, before)] = alone.run(awake)
    alone.load("digits-resnet")
    alone.train(2)
    [(after_s, after)] = alone.run(awake)
    assert 0 < (after - before) / (after_s - before_s) < 200
    assert alone.run("hvd.allreduce(torch.ones(2)).tolist()") == [[1.0, 1.0]]
    assert alone.run("__import__('gpumem_nb.engine.link.settings', fromlist=['_']).started_with()") == [
        {"HOROVOD_FUSION_THRESHOLD": str(16 * 2**20)}
    ]
