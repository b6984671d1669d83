"""Calls to ranks under way: one message to each rank, followed one by one."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple, cast

import cloudpickle
from ipyparallel import AsyncResult
from ipyparallel.error import EngineError, RemoteError

from ..internals.ipyparallel_internals import late_output, published_beside
from ..shared.answers import Answer, Apart, Pulse, Raised
from ..shared.errors import ClusterDied, RankError, TrialFailed
from ..shared.units import name_ranks
from .interrupts import shielded

SLICE_S = 0.1
"""Waiting is done in slices: between them an interrupt is heard, inside it could leave a lock of Python's locked."""


class Call:
    """One request to some ranks.

    Attributes:
        ranks: whom it went to, in rank order.
    """

    def __init__(self, ranks: Sequence[int], results: Sequence[AsyncResult], pulse: str) -> None:
        self.ranks = tuple(ranks)
        self._answers: dict[int, Answer | Exception] = {}  # as they came, their content still packed
        self._results = list(results)
        self._pulse = pulse
        self._outcomes: dict[int, _Outcome] = {}
        self._aborted: ClusterDied | None = None
        self._callbacks: list[Callable[[], None]] = []

    def abort(self, error: ClusterDied) -> None:
        """Tell every call that waits, within a tenth of a second, why the ranks are gone."""
        self._aborted = error
        for callback in self._callbacks:
            callback()

    def wait(self, timeout: float | None) -> bool:
        """Wait until all ranks answered or one failed; says whether all answered."""
        with shielded():
            done = concurrent.futures.wait(self._results, timeout, return_when=concurrent.futures.FIRST_EXCEPTION)
        return not done.not_done

    def finished(self, timeout: float) -> bool:
        """Return whether all ranks have answered, in one way or another, within ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while self._aborted is None and self.pending():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with shielded():
                concurrent.futures.wait(self._results, min(left, SLICE_S))
        return True

    def pending(self) -> list[int]:
        """Return the ranks that have not answered yet."""
        return [rank for rank, result in zip(self.ranks, self._results, strict=True) if not result.done()]

    def apart(self) -> dict[int, Apart]:
        """Return the ranks that have answered that they came apart from the others."""
        return {rank: answer.apart for rank, answer in self._come().items() if answer.apart}

    def pulses(self) -> dict[int, Pulse]:
        """Return the latest sign of life of each rank that has worked on this for more than a second."""
        waiting = [(rank, result) for rank, result in zip(self.ranks, self._results, strict=True) if not result.done()]
        data = {rank: published_beside(result) for rank, result in waiting}
        return {rank: beside[self._pulse] for rank, beside in data.items() if self._pulse in beside}

    def first_error(self) -> Exception | None:
        """Return what the first rank that failed had to say, as soon as it did, or why none will answer."""
        if self._aborted:
            return copy(self._aborted)
        for rank, result in zip(self.ranks, self._results, strict=True):
            if result.done() and (error := self._outcome(rank, result).error):
                return error
        return None

    def failed_trial(self) -> TrialFailed | None:
        """Return what a rank that has answered says of a step that failed there, and for which others waited."""
        done = [(rank, result) for rank, result in zip(self.ranks, self._results, strict=True) if result.done()]
        errors = (self._outcome(rank, result).error for rank, result in done)
        return next((error for error in errors if isinstance(error, TrialFailed)), None)

    def went_well(self) -> bool:
        """Return whether all ranks have done it."""
        return not self.pending() and self.first_error() is None

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
        """Return the answers in rank order; waits and raises as :meth:`slices`."""
        for _ in self.slices(timeout):
            pass
        return [self._outcome(rank, result).value for rank, result in zip(self.ranks, self._results, strict=True)]

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back (on another thread) each time a rank has answered, and when the ranks are gone."""
        self._callbacks.append(callback)
        for result in self._results:
            result.add_done_callback(lambda _: callback())

    def notes(self) -> list[str]:
        """Return what the ranks that have answered say of their surroundings, each sentence once."""
        said: dict[str, list[int]] = {}
        for rank, answer in sorted(self._come().items()):
            for note in answer.notes:
                said.setdefault(note, []).append(rank)
        everywhere = len(self.ranks)
        return [note if len(of) == everywhere else f"{name_ranks(of)}: {note}" for note, of in said.items()]

    def drew(self) -> bool:
        """Return whether a rank has moved the random numbers that cells draw, or may have: it did not answer."""
        answers = self._come()  # a rank whose answer is an error may have, too
        return len(answers) < len(self.ranks) or any(answer.drew for answer in answers.values())

    def outputs(self) -> list[str]:
        """Return what each rank has printed so far, standard output and error together, in rank order."""
        return [result.stdout + result.stderr for result in self._results]

    def late_outputs(self) -> list[str]:
        """Return what each rank has printed since it had answered and since this was last asked, in rank order."""
        return [late_output(result) for result in self._results]

    def settle(self, timeout: float) -> None:
        """Wait for the last output, which travels beside the answers and may arrive after them.

        No longer than ``timeout`` s for each rank, unless more comes in each such time.
        """
        for result in self._results:
            come = -1
            while result.done() and come < (come := len(result.stdout) + len(result.stderr)):
                if result.wait_for_output(timeout):
                    break

    def displays(self) -> list[list[dict[str, Any]]]:
        """Return what each rank displayed (figures, tables), as MIME bundles."""
        return [[output["data"] for output in result.outputs] for result in self._results]

    def _outcome(self, rank: int, result: AsyncResult) -> _Outcome:
        if rank not in self._outcomes:
            answer = self._opened(rank, result)
            self._outcomes[rank] = _read(rank, answer) if isinstance(answer, Answer) else _Outcome(error=answer)
        return self._outcomes[rank]

    def _come(self) -> dict[int, Answer]:
        """Return the answers that have come, without errors that stand in place of one."""
        done = [(rank, result) for rank, result in zip(self.ranks, self._results, strict=True) if result.done()]
        opened = {rank: self._opened(rank, result) for rank, result in done}
        return {rank: answer for rank, answer in opened.items() if isinstance(answer, Answer)}

    def _opened(self, rank: int, result: AsyncResult) -> Answer | Exception:
        if rank not in self._answers:
            self._answers[rank] = _open(rank, result)
        return self._answers[rank]


class _Outcome(NamedTuple):
    """A rank's value, or the error that came instead of it."""

    value: Any = None
    error: Exception | None = None


def _open(rank: int, result: AsyncResult) -> Answer | Exception:
    """Return what came from a rank; an exception stands for the failure to get there."""
    error = result.exception(0)
    if error is None:
        return cast(Answer, cloudpickle.loads(result.result()))  # get() may not be ready yet, a moment after done()
    if isinstance(error, EngineError) or getattr(error, "ename", "") == "EngineError":
        return ClusterDied(f"Rank {rank} ended while it was working.")
    if isinstance(error, RemoteError):
        return RankError(rank, error.ename, error.evalue, error.traceback or "")
    return cast(Exception, error)


def _read(rank: int, answer: Answer) -> _Outcome:
    try:
        content = cloudpickle.loads(answer.content)
    except Exception as error:  # whatever a user's class raises when it is made again
        why = (
            f"what it answered, {answer.kind}, cannot be read in the notebook ({error}). Return numbers, text, arrays "
            "or tensors instead, or make what it needs importable here too."
        )
        return _Outcome(error=RankError(rank, type(error).__name__, why))
    if isinstance(content, Raised):
        content = RankError(rank, content.ename, content.evalue, content.traceback)
    return _Outcome(error=content) if answer.raised else _Outcome(content)
