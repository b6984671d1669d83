"""Horovod's link between ranks keeps the promises of every link."""

from __future__ import annotations

import inspect

import pytest

from gpumem_nb.session import Session
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
