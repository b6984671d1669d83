"""What is said to whoever pressed stop."""

from __future__ import annotations

import pytest

from gpumem_nb.kernel.foreground import InterruptTracker


@pytest.mark.parametrize(
    ("stopped", "done", "said"),
    [
        (True, False, "stopped what they were doing and are ready"),
        (True, True, "had come to the end of it by then"),
        (False, False, "Rank 1 has not stopped yet"),
    ],
)
def test_what_came_of_it_is_told(stopped: bool, done: bool, said: str) -> None:
    told = InterruptTracker().explain(lambda: stopped, lambda: [] if stopped else [1], lambda: done)
    assert said in str(told)
