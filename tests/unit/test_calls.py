from __future__ import annotations

from concurrent.futures import Future

import cloudpickle
import pytest

from gpumem_nb.cluster.calls import Call
from gpumem_nb.shared.messages import Answer


class JustAnswered(Future[bytes]):
    """An answer of ipyparallel's in the moment in which it is done and its get() does not know it yet."""

    def get(self, timeout: float | None = None) -> bytes:
        raise TimeoutError("Result not ready.")


def test_an_answer_is_there_as_soon_as_it_is_done() -> None:
    result = JustAnswered()
    call = Call([0], [result], pulse="pulse")
    assert call.first_error() is None
    assert call.pending() == [0]
    result.set_result(cloudpickle.dumps(Answer(7)))
    assert call.first_error() is None
    assert call.get() == [7]


def test_waiting_for_an_answer_ends_at_the_time_limit() -> None:
    with pytest.raises(TimeoutError, match="rank 0 did not answer"):
        Call([0], [JustAnswered()], pulse="pulse").get(0.01)
