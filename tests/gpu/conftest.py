"""Sessions on a real GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import gpumem_nb
from gpumem_nb.cluster.resources import visible_gpus
from gpumem_nb.session import Session


@pytest.fixture(scope="module")
def on_gpu(request: pytest.FixtureRequest) -> Iterator[Session]:
    """As many ranks on real GPUs as the module's ``RANKS``."""
    if not visible_gpus():
        pytest.skip("there is no GPU here")
    with gpumem_nb.start(request.module.RANKS, device="cuda") as session:
        yield session


@pytest.fixture
def trained(on_gpu: Session, fresh: Callable[..., Session]) -> Session:
    """Those ranks after a few steps of a small workload."""
    session = fresh(on_gpu)
    session.train(5)
    return session
