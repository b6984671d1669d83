"""Sessions on a real GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import gpumem_nb
from gpumem_nb.cluster.resources import visible_gpus
from gpumem_nb.session import Session


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Callable[..., Session]]:
    """Start ranks on real GPUs, or use those that run already."""
    if not visible_gpus():
        pytest.skip("there is no GPU here")
    sessions: list[Session] = []

    def start(n: int) -> Session:
        if not sessions:
            sessions.append(gpumem_nb.start(n, device="cuda"))
        return sessions[0]

    yield start
    for session in sessions:
        session.stop()
