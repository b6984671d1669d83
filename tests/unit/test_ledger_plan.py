"""How often steps are recorded: as somebody asks for, or by itself so that it takes little of the time."""

from __future__ import annotations

import pytest

from gpumem_nb.kernel.history import History
from gpumem_nb.kernel.ledger_plan import cost, recorded_every
from gpumem_nb.shared.messages import Ledger
from gpumem_nb.shared.settings import Settings
from tests.unit.test_history import READING, sample

LEDGER = Ledger(1, "", "", {}, {}, (), True, True)


def durations(longer: float | None) -> tuple[list[float], list[float]]:
    """Of a history in which recorded steps take so much longer, but for one that another program held up."""
    history = History(1)
    history.begin(1, "w", Settings())
    assert history.step_durations() == ([], [])
    recorded = {9: 100.0, 19: 1 + longer, 29: 1 + longer} if longer is not None else {}
    steps = [sample(step, 1, recorded.get(step, 1.0), LEDGER if step in recorded else None) for step in range(1, 33)]
    history.add(steps, [READING])
    return history.step_durations()


@pytest.mark.parametrize(
    ("asked", "longer", "every"),
    [
        ("auto", None, 20),
        ("auto", -0.1, 20),
        ("auto", 0.09, 20),  # of 20 steps that is less than half a percent
        ("auto", 0.11, 40),
        ("auto", 1.49, 300),
        (5, 1.5, 5),
        ("never", 1.5, 0),
    ],
)
def test_by_itself_recording_takes_no_more_than_half_a_percent_of_the_time(
    asked: int | str, longer: float | None, every: int
) -> None:
    assert recorded_every(asked, *durations(longer)) == every


def test_the_cost_of_recording_steps_is_a_share_of_all_time() -> None:
    assert cost(*durations(None)) is None
    assert cost(*durations(0.5)) == pytest.approx(0.5 * 3 / 30)
