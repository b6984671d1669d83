"""Dry runs in forks of a process that has imported torch, which takes fifty times as long as most answers."""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import warnings
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

from gpumem_nb.planning import dry_process
from gpumem_nb.shared.answers import Progress
from gpumem_nb.shared.errors import InvalidInput, WorkloadError
from gpumem_nb.shared.forecast import DryAnswer, DryRun

_forks = multiprocessing.get_context("forkserver")
# What dry runs import, and the modules of tests whose functions they are given.
_forks.set_forkserver_preload(["torch._dynamo", "gpumem_nb.engine.dry.answer", "IPython", "pytest"])
_usual = dry_process.ask


def forked() -> AbstractContextManager[Any]:
    """Inside, dry runs are taken in forks."""
    return patch.object(dry_process, "ask", _ask)


def apart() -> AbstractContextManager[Any]:
    """Inside, dry runs have a process of their own, as usual: for what that process does."""
    return patch.object(dry_process, "ask", _usual)


def _ask(question: DryRun, progress: Progress = lambda what, done: None) -> DryAnswer:
    hears, tells = _forks.Pipe(duplex=False)
    process = _forks.Process(target=_answer, args=(tells, pickle.dumps(question), dry_process.MOST_BYTES))
    process.start()
    tells.close()
    answer: DryAnswer | None = None
    with hears, suppress(EOFError):
        while True:
            answer = hears.recv()
            progress(*answer.next)
    process.join()
    assert answer is not None
    if answer.problem:
        raise (InvalidInput if answer.of_input else WorkloadError)(answer.problem)
    return answer


def _answer(tells: Connection, question: bytes, most_bytes: int) -> None:
    import torch

    from gpumem_nb.engine.dry.answer import answers

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    warnings.simplefilter("ignore")
    for answer in answers(pickle.loads(question)):
        tells.send(answer)
