"""What is said to whoever pressed stop."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from gpumem_nb.cluster.calls import Call
from gpumem_nb.kernel.foreground import Foreground, InterruptTracker


@pytest.mark.parametrize(
    ("stopped", "done", "said"),
    [
        (True, False, "stopped what they were doing and are ready"),
        (True, True, "had come to the end of it by then"),
        (False, False, "Rank 1 has not stopped yet: it stops when the code that cannot be interrupted ends"),
    ],
)
def test_what_came_of_it_is_told(stopped: bool, done: bool, said: str) -> None:
    told = InterruptTracker().explain(lambda: stopped, lambda: [] if stopped else [1], lambda: done)
    assert said in str(told)


def test_a_time_out_behind_steps_of_training_interrupts_none_of_them() -> None:
    ranks, training, steps, call = MagicMock(), MagicMock(), MagicMock(), MagicMock()
    training.under_way.return_value = ranks.ahead_of.return_value = [steps]
    call.slices.side_effect = TimeoutError("it has to wait for a step")
    call.finished.return_value = True  # soon after the step
    nothing: Any = lambda *_: ""  # noqa: E731
    foreground = Foreground(ranks, training, MagicMock(), nothing, nothing, nothing)

    def post(posted: Any) -> Call:
        posted(call)
        return call

    with pytest.raises(TimeoutError, match="wait for a step"):
        foreground.finish(post, 0.1)
    steps.finished.assert_called_once()
    ranks.interrupt_until.assert_not_called()
