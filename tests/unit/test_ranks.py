"""Joining ranks again, against answers that come, do not come, or never will."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_nb.cluster.ranks import Ranks
from gpumem_nb.shared.errors import ClusterDied, RankError, TrainingFailed
from tests.internals import ranks_without_processes
from tests.timing import HANG_S

APART = SimpleNamespace()


class Request:
    """A call that is answered when the test says so."""

    def __init__(self, apart: bool = False, left: list[int] | None = None, error: Exception | None = None) -> None:
        self.left, self.error, self._apart = left or [], error, apart
        self._over = threading.Event()

    def pending(self) -> list[int]:
        return self.left

    def finished(self, timeout: float) -> bool:
        return not self.left or self._over.wait(timeout)

    def apart(self) -> dict[int, Any]:
        return {0: APART} if self._apart else {}

    def abort(self, error: ClusterDied) -> None:
        self._over.set()

    def get(self, timeout: float) -> list[Any]:
        if self.error:
            raise self.error
        return []


def ranks(*calls: Request, answers: list[Request]) -> tuple[Ranks, list[Request]]:
    posted: list[Request] = []

    def post(*arguments: Any, **keywords: Any) -> Request:
        posted.append(answers[len(posted)])
        return posted[-1]

    return ranks_without_processes([*calls], post), posted


def test_ranks_that_came_apart_are_joined_once_nobody_works() -> None:
    working = Request(apart=True, left=[1])
    some, posted = ranks(working, answers=[Request()])
    assert not some.rejoin()
    assert posted == []
    working.left = []
    assert some.rejoin()
    assert some.rejoin()
    assert len(posted) == 1


def test_a_death_ends_the_waiting_for_ranks_that_are_to_be_joined() -> None:
    some, posted = ranks(Request(apart=True, left=[1]), answers=[])
    said: list[str] = []

    def wait() -> None:
        try:
            some.rejoin(60.0)
        except ClusterDied as error:
            said.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    some.stop()  # no answer will come any more
    waiting.join(HANG_S)
    assert said == ["The ranks were ended. Start again with %hvd_restart."]
    assert posted == []


def test_only_those_are_interrupted_who_have_yet_to_stop() -> None:
    some, _ = ranks(answers=[])
    signals: list[int] = []
    some._identities = [SimpleNamespace(signal=lambda number, rank=rank: signals.append(rank)) for rank in (0, 1)]  # type: ignore[misc]
    busy = [0, 1]

    def stopped(timeout: float) -> bool:
        if len(signals) == 2:
            busy.remove(0)  # trains on
        return len(signals) > 3

    assert some.interrupt_until(stopped, lambda: busy)
    assert signals == [0, 1, 1, 1]


def test_joining_that_failed_is_tried_again() -> None:
    some, posted = ranks(Request(apart=True), answers=[Request(error=RankError(0, "Separated", "busy")), Request()])
    with pytest.raises(TrainingFailed, match="could not be joined again"):
        some.rejoin()
    posted[0]._apart = True
    some._calls.append(posted[0])  # type: ignore[arg-type]  # whose answer says that its ranks are apart
    assert some.rejoin()
    assert len(posted) == 2


def test_ranks_that_are_slow_to_join_are_waited_for_again_and_not_given_up() -> None:
    slow = Request(error=TimeoutError("rank 1 did not answer within 10 s"))
    some, posted = ranks(Request(apart=True), answers=[slow])
    with pytest.raises(TrainingFailed, match="rank 1 did not answer"):
        some.rejoin()
    slow.error = None
    assert some.rejoin()
    assert len(posted) == 1, "they are asked once"
