"""Calls to ranks: answers that have come, that are late, and that this process cannot read."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest

from gpumem_nb.cluster.calls import Call
from gpumem_nb.engine.entry import failed
from gpumem_nb.engine.packing import returned
from gpumem_nb.shared import errors
from gpumem_nb.shared.answers import Apart, Waiting
from gpumem_nb.shared.errors import GpumemError, RankError, Stalled


class JustAnswered(Future[bytes]):
    """An answer of ipyparallel's in the moment in which it is done and its get() does not know it yet."""

    def get(self, timeout: float | None = None) -> bytes:
        raise TimeoutError("Result not ready.")


def answered(*answers: Any) -> Call:
    """A call that these ranks have answered."""
    results = [JustAnswered() for _ in answers]
    for result, answer in zip(results, answers, strict=True):
        result.set_result(cloudpickle.dumps(answer))
    return Call(range(len(answers)), results, pulse="pulse")


def of_the_ranks_alone(make: Callable[[types.ModuleType], Any]) -> Any:
    """The answer with an object of a module that this process does not have."""
    module = types.ModuleType("only_on_ranks")
    sys.modules["only_on_ranks"] = module
    try:
        exec("class Thing:\n    pass\n", vars(module))
        return returned(make(module), apart=None)
    finally:
        del sys.modules["only_on_ranks"]


def test_an_answer_is_there_as_soon_as_it_is_done() -> None:
    result = JustAnswered()
    call = Call([0], [result], pulse="pulse")
    assert call.first_error() is None
    assert call.pending() == [0]
    result.set_result(cloudpickle.dumps(returned(7, apart=None)))
    assert call.first_error() is None
    assert call.get() == [7]


def test_waiting_for_an_answer_ends_at_the_time_limit() -> None:
    with pytest.raises(TimeoutError, match="rank 0 did not answer"):
        Call([0], [JustAnswered()], pulse="pulse").get(0.01)


def test_ranks_that_have_not_answered_may_have_drawn_random_numbers() -> None:
    drew, plain = (replace(returned(1, apart=None), drew=drew) for drew in (True, False))
    assert answered(plain, drew).drew()  # though nobody has looked at it
    assert not answered(plain, plain).drew()
    late, gone = JustAnswered(), JustAnswered()
    assert Call([0], [late], pulse="pulse").drew()
    gone.set_exception(OSError("gone"))
    assert Call([0], [gone], pulse="pulse").drew()


def test_an_answer_that_cannot_be_read_here_is_an_error_of_that_call_alone() -> None:
    call = answered(returned(1, apart=None), of_the_ranks_alone(lambda module: module.Thing()))
    with pytest.raises(RankError, match=r"1: ModuleNotFoundError: .*only_on_ranks\.Thing.*cannot be read") as caught:
        call.get()
    assert "Return" in str(caught.value)
    assert call.first_error() is call.first_error()
    assert call.apart() == {}


def test_a_list_with_something_unreadable_is_named_as_a_list() -> None:
    call = answered(of_the_ranks_alone(lambda module: [module.Thing()]))
    with pytest.raises(RankError, match="a list, cannot be read"):
        call.get()


class Demanding(Exception):
    """Cannot be made again from its text, so pickle cannot read it."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def test_an_exception_that_cannot_be_made_again_is_an_error_of_that_call_alone() -> None:
    call = answered(returned(Demanding(1, 2), apart=None))
    with pytest.raises(RankError, match=r"TypeError.*Demanding, cannot be read"):
        call.get()


def test_who_came_apart_is_known_although_the_answer_cannot_be_read() -> None:
    apart = Apart("a cell", Waiting("all-reduce 'x'", 3.0))
    unreadable = of_the_ranks_alone(lambda module: module.Thing())
    call = answered(type(unreadable)(unreadable.content, unreadable.kind, apart=apart))
    assert call.apart() == {0: apart}


def test_a_call_went_well_once_all_ranks_have_answered_and_none_with_an_error() -> None:
    assert answered(returned(1, apart=None), returned(2, apart=None)).went_well()
    assert not Call([0], [JustAnswered()], pulse="pulse").went_well()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        stopped = failed(error, "the traceback", apart=None)
    assert not answered(returned(1, apart=None), stopped).went_well()


def test_an_exception_that_a_cell_returns_is_its_value() -> None:
    (value,) = answered(returned(ValueError("kept for later"), apart=None)).get()
    assert isinstance(value, ValueError)


def test_an_exception_that_a_cell_raises_is_an_error_with_its_traceback() -> None:
    empty: dict[str, int] = {}
    try:
        empty["missing"]
    except KeyError as error:
        answer = failed(error, "the traceback", apart=None)
    with pytest.raises(RankError, match="rank 0: KeyError: 'missing'") as caught:
        answered(answer).get()
    assert caught.value.remote_traceback == "the traceback"


OF_THE_TOOLKIT: list[GpumemError] = [
    errors.InvalidInput("no"),
    errors.NoSession(),
    errors.WorkloadError("no data"),
    errors.ClusterDied("Rank 1 ended."),
    RankError(3, "KeyError", "'x'", "the traceback"),
    Stalled(RankError(3, "KeyError", "'x'", "the traceback"), "rank 1 waited"),
]


@pytest.mark.parametrize("error", OF_THE_TOOLKIT, ids=lambda error: type(error).__name__)
def test_errors_of_the_toolkit_travel_as_they_are(error: GpumemError) -> None:
    call = answered(failed(error, "", apart=None))
    with pytest.raises(type(error)) as caught:
        call.get()
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)
    assert caught.value._render_traceback_() == error._render_traceback_()


def test_what_ranks_say_of_their_surroundings_is_said_once_and_by_whom() -> None:
    nothing = returned(None, apart=None)
    call = answered(replace(nothing, notes=("both",)), replace(nothing, notes=("both", "one")))
    assert call.get() == [None, None]
    assert call.notes() == ["both", "rank 1: one"]


class Talking(Future[bytes]):
    """An answer whose output comes in pieces after it, and is never said to be complete."""

    stderr, pieces = "", 4
    stdout = ""

    def wait_for_output(self, timeout: float) -> bool:
        self.stdout += "more" * (self.pieces > 0)
        self.pieces -= 1
        return False


def test_output_is_waited_for_as_long_as_more_of_it_comes() -> None:
    result = Talking()
    result.set_result(b"")
    call = Call([0], [result], pulse="pulse")
    call.settle(0.0)
    assert call.outputs() == ["more" * 4]
    assert result.pieces == -1
