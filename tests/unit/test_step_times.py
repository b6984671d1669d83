"""Where the time of a step goes: parts without gaps, and what of the reduction backward hides."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from gpumem_nb.engine.step.step_clock import UNDOING, Flight, Laps, StepClock
from gpumem_nb.shared.step_times import (
    BACKWARD,
    COPY,
    DATA,
    FORWARD,
    REDUCTION,
    TOOLKIT,
    UPDATE,
)


def laps(*parts: tuple[str, float], flights: tuple[Flight, ...] = (), backward_ended_s: float = 0.0) -> Laps:
    """Of parts that took so many seconds."""
    began_s = [100.0]
    for _, seconds in parts:
        began_s.append(began_s[-1] + seconds)
    return Laps([part for part, _ in parts], began_s, (), flights, backward_ended_s)


def test_parts_that_come_several_times_are_added_up_and_sum_to_the_step() -> None:
    taken = laps((TOOLKIT, 1), (DATA, 2), (FORWARD, 3), (BACKWARD, 4), (DATA, 5), (FORWARD, 6), (BACKWARD, 7))
    times = taken.times()
    assert [times[part] for part in (TOOLKIT, DATA, COPY, FORWARD, BACKWARD, UPDATE)] == [1, 7, 0, 9, 11, 0]
    assert times.total_s == pytest.approx(taken.step_s) == pytest.approx(28)


def test_copies_for_undoing_are_the_toolkits_share() -> None:
    assert laps((UNDOING, 2), (UPDATE, 1), (TOOLKIT, 3)).times()[TOOLKIT] == 5


@pytest.mark.parametrize(
    ("flights", "hidden_s"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(1, 3), (2, 4)], 3),
        ([(1, 3), (5, 6)], 3),
        ([(1, 4), (2, 3)], 3),
        ([(8, 12)], 2),
        ([(11, 12)], 0),
        ([(5, 6), (1, 3)], 3),
    ],
)
def test_hidden_is_what_was_on_its_way_while_backward_went_on(flights: list[Any], hidden_s: float) -> None:
    sent = tuple(Flight(4, began, ended) for began, ended in flights)
    assert laps((BACKWARD, 10), (REDUCTION, 2), flights=sent, backward_ended_s=10.0).times().hidden_s == hidden_s


def test_a_clock_measures_and_tells_what_a_trial_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 21.0, 21.0, 28.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = StepClock(torch.device("cpu"))
    clock.begin()  # 0
    for part in (DATA, FORWARD, UNDOING, UPDATE, DATA):  # 1, 3, 6, 10, 15
        clock.enter(part)
    clock.enter(TOOLKIT)  # 21
    assert clock.work_s() == 1 + 3 + 5, "without data and undoing"
    assert clock.data_s() == 2 + 6
    ended = clock.end((), 0.0)
    assert ended.step_s == 28
    assert ended.times().total_s == 28


class Event:
    """CUDA's, of a device that is 10 ms behind and takes twice as long as the process."""

    made: list[Event] = []  # noqa: RUF012

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.place, self.awaited = len(self.made), False
        self.made.append(self)

    def record(self, stream: object) -> None:
        assert stream == "the stream"

    def elapsed_time(self, later: Event) -> float:
        assert self.made[-1].awaited, "the device may not be there yet"
        return 2.0 * (later.place - self.place)

    def synchronize(self) -> None:
        self.awaited = True


def test_on_gpus_it_is_the_devices_time_and_nothing_waits_within_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    clock = StepClock(torch.device("cuda"))
    clock.begin()
    for part in (FORWARD, BACKWARD, REDUCTION, UPDATE):
        clock.enter(part)
    ended = clock.end((Flight(1, 0.0, 1.0),), 2.0)
    assert not any(event.awaited for event in Event.made)
    times = ended.times()
    assert [times[part] for part in (TOOLKIT, FORWARD, BACKWARD, REDUCTION, UPDATE)] == [0.002] * 5
    assert times.hidden_s is None
