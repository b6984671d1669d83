"""Chunks that are given up: nothing is sent until whoever still works on one has answered."""

from __future__ import annotations

from typing import Any, cast

from gpumem_nb.kernel.training.chunks import InFlight
from gpumem_nb.shared.messages import Chunk
from gpumem_nb.shared.settings import Settings


class Request:
    """A call that rank 1 has yet to answer."""

    def __init__(self) -> None:
        self.left = [1]

    def pending(self) -> list[int]:
        return self.left

    def when_done(self, news: Any) -> None:
        pass


class Ranks:
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.posted: list[Request] = []

    def post(self, *arguments: Any) -> Request:
        self.posted.append(Request())
        return self.posted[-1]


def test_what_was_given_up_first_is_waited_for_after_a_second_fault_too() -> None:
    ranks = Ranks()
    in_flight = InFlight(cast(Any, ranks), lambda: None)
    in_flight.send(Chunk(Settings(), 1, 1))
    assert in_flight.give_up(forget=False)
    assert in_flight.give_up(forget=False), "rank 1 has still not answered"
    assert not in_flight.free(1)
    ranks.posted[0].left = []
    assert in_flight.free(1)


def test_nobody_is_waited_for_who_is_gone() -> None:
    in_flight = InFlight(cast(Any, Ranks()), lambda: None)
    in_flight.send(Chunk(Settings(), 1, 1))
    in_flight.give_up(forget=False)
    assert not in_flight.give_up(forget=True)
    assert in_flight.free(1)
