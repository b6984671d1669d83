"""Calls to ranks under way: one message to each rank, followed one by one."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
from ipyparallel import AsyncResult
from ipyparallel.error import EngineError, RemoteError

from ..shared.errors import ClusterDied, RankError
from ..shared.messages import Answer, Apart, Pulse, Raised
from ..shared.ranklist import name_ranks
from .shield import shielded

SLICE_S = 0.1
"""Waiting is done in slices: between them an interrupt is heard, inside it could leave a lock of Python's locked."""


class Call:
    """One request to some ranks.

    Attributes:
        ranks: whom it went to, in rank order.
    """

    def __init__(self, ranks: Sequence[int], results: Sequence[AsyncResult], pulse: str) -> None:
        self.ranks = tuple(ranks)
        self._apart: dict[int, Apart] = {}
        self._results = list(results)
        self._pulse = pulse
        self._answers: dict[int, Any] = {}
        self._aborted: ClusterDied | None = None
        self._callbacks: list[Callable[[], None]] = []

    def abort(self, error: ClusterDied) -> None:
        """Nobody will answer any more: let everyone who waits know why, within a tenth of a second."""
        self._aborted = error
        for callback in self._callbacks:
            callback()

    def wait(self, timeout: float | None) -> bool:
        """Wait until all ranks answered or one failed; says whether all answered."""
        with shielded():
            done = concurrent.futures.wait(self._results, timeout, return_when=concurrent.futures.FIRST_EXCEPTION)
        return not done.not_done

    def finished(self, timeout: float) -> bool:
        """Whether all ranks have answered, in one way or another, within ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while self._aborted is None and self.pending():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with shielded():
                concurrent.futures.wait(self._results, min(left, SLICE_S))
        return True

    def pending(self) -> list[int]:
        """The ranks that have not answered yet."""
        return [rank for rank, result in zip(self.ranks, self._results, strict=True) if not result.done()]

    def apart(self) -> dict[int, Apart]:
        """The ranks that have answered that they came apart from the others."""
        for rank, result in zip(self.ranks, self._results, strict=True):
            if result.done():
                self._answer(rank, result)
        return dict(self._apart)

    def pulses(self) -> dict[int, Pulse]:
        """The latest sign of life of each rank that has worked on this for more than a second."""
        waiting = [(rank, result) for rank, result in zip(self.ranks, self._results, strict=True) if not result.done()]
        data = {rank: result.metadata["data"] for rank, result in waiting}
        return {rank: beside[self._pulse] for rank, beside in data.items() if self._pulse in beside}

    def first_error(self) -> Exception | None:
        """What the first rank that failed had to say, as soon as it did, or why nobody will."""
        if self._aborted:
            return ClusterDied(self._aborted.cause)
        for rank, result in zip(self.ranks, self._results, strict=True):
            if result.done() and isinstance(answer := self._answer(rank, result), Exception):
                return answer
        return None

    def slices(self, timeout: float | None) -> Iterator[bool]:
        """Wait in slices of a tenth of a second: ``False`` after each, ``True`` at the end.

        Raises the first error at once, without waiting for the other ranks, and ``TimeoutError`` after ``timeout`` s.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            finished = self.wait(min(SLICE_S, max(0.0, deadline - time.monotonic())))
            error = self.first_error()
            yield finished or error is not None
            if error:
                raise error
            if finished:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{name_ranks(self.pending())} did not answer within {timeout:g} s.")

    def get(self, timeout: float | None = None) -> list[Any]:
        """The answers in rank order; waits and raises as :meth:`slices`."""
        for _ in self.slices(timeout):
            pass
        return [self._answer(rank, result) for rank, result in zip(self.ranks, self._results, strict=True)]

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back (on another thread) each time a rank has answered, and when nobody will any more."""
        self._callbacks.append(callback)
        for result in self._results:
            result.add_done_callback(lambda _: callback())

    def outputs(self) -> list[str]:
        """What each rank has printed so far, standard output and error together, in rank order."""
        return [result.stdout + result.stderr for result in self._results]

    def settle(self, timeout: float) -> None:
        """Wait for the last output: it travels beside the answers and may arrive after them."""
        for result in self._results:
            if result.done():
                result.wait_for_output(timeout)

    def _answer(self, rank: int, result: AsyncResult) -> Any:
        if rank not in self._answers:
            answer = _decode(rank, result)
            if isinstance(answer, Answer):
                if answer.apart:
                    self._apart[rank] = answer.apart
                answer = answer.value
            if isinstance(answer, Raised):
                answer = RankError(rank, answer.ename, answer.evalue, answer.traceback)
            self._answers[rank] = answer
        return self._answers[rank]

    def displays(self) -> list[list[dict[str, Any]]]:
        """What each rank displayed (figures, tables), as MIME bundles."""
        return [[output["data"] for output in result.outputs] for result in self._results]


def _decode(rank: int, result: AsyncResult) -> Any:
    """What a rank answered; an exception stands for its failure."""
    error = result.exception(0)
    if error is None:
        return cloudpickle.loads(result.result())  # get() may not be ready yet, a moment after done()
    if isinstance(error, EngineError) or getattr(error, "ename", "") == "EngineError":
        return ClusterDied(f"Rank {rank} ended while it was working.")
    if isinstance(error, RemoteError):
        return RankError(rank, error.ename, error.evalue, error.traceback or "")
    return error
