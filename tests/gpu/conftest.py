"""Sessions on a real GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import gpumem_nb
from gpumem_nb.cluster.resources import visible_gpus
from gpumem_nb.session import Session

HOLDS = """
import sys, torch
size, leaving = map(int, sys.argv[1:])
torch.cuda.init()  # a process's own context takes hundreds of MiB
held = torch.zeros(size or torch.cuda.mem_get_info()[0] - leaving, dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(size: int = 0, leaving: int = 0) -> Iterator[None]:
    """One that holds so many bytes on the first GPU, or all but some."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(size), str(leaving)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.stdin.close()  # it ends by itself


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
