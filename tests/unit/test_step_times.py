"""Where the time of a step goes: parts without gaps, and what of the reduction backward hides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

import pytest
import torch

from gpumem_nb.engine.step.step_clock import UNDOING, BucketTransfer, StepClock, StepTimings, _Mark, event_here
from gpumem_nb.report.step_time import TimeReport, aligned
from gpumem_nb.shared.step_times import (
    BACKWARD,
    COPY,
    DATA,
    FORWARD,
    MEANING,
    PARTS,
    REDUCTION,
    TOOLKIT,
    UPDATE,
    StepLanes,
    StepTimes,
)
from gpumem_nb.ui import legend
from gpumem_nb.ui.figures import lanes_figure
from tests.ledgers import sample, waits


def laps(*parts: tuple[str, float], transfers: tuple[BucketTransfer, ...] = ()) -> StepTimings:
    """Of parts that took so many seconds, from 100 on."""
    marks, now_s = [], 100.0
    for part, seconds in (*parts, ("", 0.0)):
        marks.append(_Mark(part, now_s))
        now_s += seconds
    return StepTimings(marks, transfers)


def times(taken: StepTimings) -> StepTimes:
    """Which are known."""
    found = taken.times()
    assert found
    return found


def test_parts_that_come_several_times_are_added_up_and_sum_to_the_step() -> None:
    taken = laps((TOOLKIT, 1), (DATA, 2), (FORWARD, 3), (BACKWARD, 4), (DATA, 5), (FORWARD, 6), (BACKWARD, 7))
    found = times(taken)
    assert [found[part] for part in (TOOLKIT, DATA, COPY, FORWARD, BACKWARD, UPDATE)] == [1, 7, 0, 9, 11, 0]
    assert found.total_s == pytest.approx(taken.step_s) == pytest.approx(28)


def test_copies_for_undoing_are_the_toolkits_share() -> None:
    assert times(laps((UNDOING, 2), (UPDATE, 1), (TOOLKIT, 3)))[TOOLKIT] == 5


@pytest.mark.parametrize(
    ("transfers", "hidden_s"),
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
def test_hidden_is_what_was_on_its_way_while_backward_went_on(transfers: list[Any], hidden_s: float) -> None:
    sent = tuple(BucketTransfer(4, 100 + began, 100 + ended, 0) for began, ended in transfers)
    assert times(laps((BACKWARD, 10), (TOOLKIT, 1), (REDUCTION, 2), transfers=sent)).hidden_s == hidden_s


def test_what_backward_waits_for_gradients_is_reduction_and_hides_nothing() -> None:
    sent = (BucketTransfer(4, 102, 107, 0), BucketTransfer(4, 108, 112, 1))
    found = times(laps((BACKWARD, 4), (REDUCTION, 3), (BACKWARD, 3), (REDUCTION, 2), transfers=sent))
    assert (found[BACKWARD], found[REDUCTION], found.hidden_s) == (7, 5, 4)


def test_a_step_without_backward_hides_nothing() -> None:
    assert times(laps((FORWARD, 10), (REDUCTION, 2), transfers=(BucketTransfer(4, 101, 103, 0),))).hidden_s == 0


def test_a_clock_measures_and_tells_what_a_trial_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 21.0, 28.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = StepClock(torch.device("cpu"))
    clock.begin()  # 0
    for part in (DATA, FORWARD, UNDOING, UPDATE, DATA):  # 1, 3, 6, 10, 15
        clock.enter(part)
    clock.enter(TOOLKIT)  # 21
    work_s, data_s = clock.until_now()
    assert work_s == 1 + 3 + 5, "without data and undoing"
    assert data_s == 2 + 6
    ended = clock.end(())
    assert ended.step_s == 28
    assert times(ended).total_s == 28


class Event:
    """CUDA's, of a device on which each is reached at the next of these times, in ms; it must be awaited to be read."""

    times_ms: Iterator[float] = iter(())
    awaited_ms = -math.inf

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == "the stream"
        self.at_ms = next(Event.times_ms)

    def elapsed_time(self, later: Event) -> float:
        assert max(self.at_ms, later.at_ms) <= Event.awaited_ms, "the device may not be there yet"
        return later.at_ms - self.at_ms

    def synchronize(self) -> None:
        Event.awaited_ms = max(Event.awaited_ms, self.at_ms)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float], Sequence[float]], None]:
    """Sets what the process's clock (in s) and the device's (in ms) say, one after another."""

    def set_to(process_s: Sequence[float], device_ms: Sequence[float]) -> None:
        now = iter(process_s)
        monkeypatch.setattr(time, "perf_counter", lambda: next(now))
        monkeypatch.setattr(Event, "times_ms", iter(device_ms))
        monkeypatch.setattr(Event, "awaited_ms", -math.inf)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    return set_to


GPU = torch.device("cuda", 0)


def refuse(*_: object) -> float:
    raise RuntimeError("CUDA error: device not ready")


def test_on_gpus_it_is_the_devices_time_and_nothing_waits_within_the_step(
    clocks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks([100.0, 100.001, 100.002, 100.003, 100.004, 100.005], [50, 52, 54, 56, 58, 60])
    clock = StepClock(GPU)
    clock.begin()
    for part in (FORWARD, BACKWARD, REDUCTION, UPDATE):
        clock.enter(part)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "another")
    ended = clock.end((BucketTransfer(1, 0.0, 1.0, 0),))
    assert Event.awaited_ms == -math.inf
    found = times(ended)
    assert [found[part] for part in (TOOLKIT, FORWARD, BACKWARD, REDUCTION, UPDATE)] == pytest.approx([0.002] * 5)
    assert found.hidden_s is None, "the process has never seen the device idle"
    assert (found.of_device, found.starved_share) == (True, None)
    monkeypatch.setattr(Event, "elapsed_time", refuse)
    assert ended.times() is None, "a step counts though it could not be timed"


def test_on_gpus_hidden_is_what_travelled_while_the_device_was_at_backward(clocks: Callable[..., None]) -> None:
    # The process has sent everything after 2 ms, long before the device has come that far.
    clocks([10.0, 10.001, 10.002, 10.1, 10.101], [705, 710, 730, 740, 790, 800, 801])
    clock = StepClock(GPU)
    clock.begin()  # 705 ms on the device
    clock.enter(BACKWARD)  # 710
    sent = [event_here(GPU), event_here(GPU)]  # 730, 740
    clock.enter(REDUCTION)  # 790
    clock.enter(UPDATE, idle=True)  # 800, when the process has 10.1 s
    early = BucketTransfer(4, 10.0015, 10.055, 0, sent[0])
    late = BucketTransfer(4, 10.0016, 10.098, 1, sent[1])
    ended = clock.end((early, late))  # 801
    assert times(ended).hidden_s == pytest.approx(0.06), "from 730 ms to the end of backward at 790"
    lanes = ended.lanes(0, 1)
    assert [lap.began_s for lap in lanes.parts] == pytest.approx([10.005, 10.01, 10.09, 10.1])
    assert [lap.began_s for lap in lanes.transfers] == pytest.approx([10.03, 10.04])
    assert [lap.ended_s for lap in lanes.transfers] == [10.055, 10.098]


def report(*reductions_s: float | None, steps: int = 12) -> TimeReport | None:
    """Of ranks that wait so long in each step of 100 ms; ``None`` stands for steps whose times are not known."""
    rows = [
        [sample(step, rank, times=None if wait is None else waits(wait)) for step in range(1, steps + 1)]
        for rank, wait in enumerate(reductions_s)
    ]
    return TimeReport.of(rows)


def test_the_report_gives_means_shares_and_the_rank_that_is_waited_for() -> None:
    found = report(0.03, 0.01)
    assert found
    assert found.waiting == pytest.approx(0.2)
    assert [one.steps for one in found.ranks] == [10, 10], "the first two warm up"
    frame = found.frame().set_index("rank")
    assert list(frame.reduction_s) == pytest.approx([0.03, 0.01])
    assert list(frame[[f"{part}_s" for part in PARTS]].sum(axis=1)) == pytest.approx([0.1, 0.1])
    text = str(found)
    assert "Ranks wait 20 % of a step" in text
    assert "Rank 1 is slowest, others wait 20 %." in text
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["0", "1", "all"]
    assert "1 (slowest)" in text
    assert "<table" in found._repr_html_()
    for part, meaning in MEANING.items():
        assert f"title='{escape(meaning)}'" in found._repr_html_(), part


def test_only_steps_under_the_latest_settings_count() -> None:
    rows = [
        [sample(step, 0, times=waits(0.09 if step < 6 else 0.01), settings_id=1 + (step >= 6)) for step in range(12)]
    ]
    found = TimeReport.of(rows)
    assert found
    assert found.ranks[0].times[REDUCTION] == pytest.approx(0.01)
    assert found.ranks[0].steps == 4
    assert found.straggler is None


def test_steps_before_a_cell_count_only_while_there_are_none_after_it() -> None:
    rows = [[sample(step, 0, times=waits(0.09 if step <= 20 else 0.01)) for step in range(1, 31)]]
    found = [TimeReport.of(rows, since) for since in (0, 20, 30)]
    assert [one and one.ranks[0].steps for one in found] == [28, 8, 28]
    assert found[1]
    assert found[1].ranks[0].times[REDUCTION] == pytest.approx(0.01)


def test_lanes_of_other_hosts_lie_where_all_ranks_left_the_reduction() -> None:
    def lane(rank: int, later_s: float) -> StepLanes:
        return laps((FORWARD, 1), (REDUCTION, 2), (UPDATE, 1)).lanes(rank, 7).moved(later_s)

    lanes = aligned([lane(0, 0.0), lane(1, 0.25), lane(2, 5000.0)], ["here", "here", "there"])
    assert [one.parts[1].ended_s for one in lanes] == pytest.approx([103, 103.25, 103.25])
    assert aligned([lane(0, 0.0), lane(1, 0.25)], ["here", "here"])[0] == lane(0, 0.0)


def test_there_is_no_report_without_a_step_whose_times_are_known() -> None:
    assert report() is None
    assert report(None, None) is None
    assert TimeReport.of([[sample(1, 0, times=waits(0.1), event="oom")]]) is None


def test_the_lanes_of_a_step_are_drawn_rank_by_rank_from_the_first_that_began() -> None:
    transfer = BucketTransfer(4 * 2**20, 101.0, 102.0, 0)
    taken = laps((TOOLKIT, 1), (FORWARD, 3), (UNDOING, 1), (UPDATE, 2), transfers=(transfer,))
    lanes = [taken.lanes(0, 7), laps((FORWARD, 2)).lanes(1, 7)]
    assert [part.name for part in lanes[0].parts] == [TOOLKIT, FORWARD, TOOLKIT, UPDATE]
    figure = lanes_figure(lanes)
    boxes = {trace.name: trace for trace in figure.data}
    assert list(boxes) == [FORWARD, UPDATE, TOOLKIT, "gradients on their way"]
    assert list(boxes[FORWARD].y) == [0, 1]
    assert list(boxes[FORWARD].x) == pytest.approx([3000, 2000], rel=1e-6)
    assert boxes[FORWARD].base[0] - boxes[FORWARD].base[1] == pytest.approx(1000)
    assert [tuple(one) for one in boxes["gradients on their way"].customdata] == [("4.0 MiB", pytest.approx(1000))]
    assert "customdata[1]" in boxes[FORWARD].hovertemplate, "x would be where the box ends"
    assert [one[1] for one in boxes[FORWARD].customdata] == pytest.approx([3000, 2000])
    assert "Step 7" in figure.layout.title.text


def test_gradients_wait_in_the_lanes_until_the_last_rank_has_sent_them() -> None:
    early, late = BucketTransfer(2**20, 101.0, 104.5, 0), BucketTransfer(2**20, 104.0, 104.5, 0)
    other = BucketTransfer(2**20, 105.0, 105.5, 1)
    lanes = [
        laps((BACKWARD, 6), transfers=(early, other)).lanes(0, 7),
        laps((BACKWARD, 6), transfers=(late, other)).lanes(1, 7),
    ]
    boxes = {trace.name: trace for trace in lanes_figure(lanes).data}
    waiting, on_their_way = boxes["gradients that not all ranks have sent yet"], boxes["gradients on their way"]
    assert list(waiting.y) == [0]
    assert list(waiting.x) == pytest.approx([3000])
    assert list(on_their_way.y) == [0, 0, 1, 1]
    assert list(on_their_way.x) == pytest.approx([500] * 4)


def test_the_key_says_the_share_of_each_part() -> None:
    found = report(0.03, 0.01)
    key = legend.key(None, found)
    assert "A step's time, 20 % of it waiting for others:" in key
    assert "reduction <b>20 %</b>" in key
    assert "forward <b>80 %</b>" in key
    assert "</i>update" not in key, "which takes no time"
    before = legend.key(None, None)
    assert "<b>" not in before, "no numbers before there are any"
    assert all(f"</i>{part} " in before for part in PARTS)
