"""One place for a chart: what is listed in the table is drawn, and nothing else has to know of it."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from plotly import graph_objects as go

from gpumem_nb.internals.plotly_internals import LiveFigure
from gpumem_nb.report.rescue import Rescue
from gpumem_nb.report.run_summary import Evaluation
from gpumem_nb.shared.categories import CATEGORIES
from gpumem_nb.shared.messages import Failure
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.step_times import PARTS
from gpumem_nb.ui.charts import Assembly, Charts, View, table
from gpumem_nb.ui.charts.chart import Axes, Chart, Drawn, Label, Place, beside
from gpumem_nb.ui.charts.view import Attempt, Choice
from tests.ledgers import MIB, info, ledger, reading, sample, waits


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test adds to the table is gone after it."""
    monkeypatch.setattr(table, "CHARTS", list(table.CHARTS))


def two_ranks() -> View:
    """Two ranks that trained four steps and were flipped at the third."""
    by_rank = [
        [
            sample(step, rank, ledger() if step == 1 else None, settings_id=1 + (step > 2), live_bytes=(9 + rank) * MIB)
            for step in range(1, 5)
        ]
        for rank in range(2)
    ]
    settings = {1: Settings(), 2: Settings(precision="bf16")}
    return View.of([info(0), info(1)], [reading(), reading()], by_rank, settings.get)


def drawn(view: View) -> tuple[Any, dict[str, Any]]:
    """The figure's traces and layout; ``figure.layout`` itself does not show what a message has changed."""
    charts = Charts(view.ranks)
    charts.update(view)
    return charts.figure.data, charts.figure.to_dict()["layout"]


def words_of(layout: dict[str, Any]) -> list[str]:
    return [re.sub("<[^>]*>", "", note["text"]) for note in layout["annotations"]]


def test_a_chart_of_ones_own_is_one_object_and_one_line() -> None:
    live = Chart(
        title=lambda view: f"Live after each step, {view.unit}",
        place=Place(row=2, column=0, span=3),
        traces=lambda view, axes: [go.Scatter(name=f"rank {info.rank}") for info in view.ranks],
        draw=lambda view, axes: Drawn(
            [(view.series.step, line / view.unit_bytes) for line in view.series.highest(lambda one: one.live_bytes)]
        ),
    )
    table.CHARTS.append(live)
    view = two_ranks()
    traces, layout = drawn(view)
    first, second = traces[-2:]
    assert [first.name, second.name] == ["rank 0", "rank 1"]
    assert [list(first.x), list(first.y), list(second.y)] == [[1, 2, 3, 4], [9] * 4, [10] * 4]
    assert first.xaxis == second.xaxis == "x6"
    assert layout["xaxis6"]["title"]["text"] == "step"
    titles = {note["text"]: note["y"] for note in layout["annotations"]}
    bottom, top = layout["yaxis6"]["domain"]
    assert 0 <= bottom < top < titles["<b>Live after each step, MiB</b>"] < layout["yaxis4"]["domain"][0]
    assert [shape["x0"] for shape in layout["shapes"] if shape["xref"] == "x6"] == [3], "the flip is marked in it too"
    assert [note["xref"] for note in layout["annotations"] if note["text"] == "bf16"] == ["x2"], "and named once"


def test_the_order_of_the_table_changes_the_axes_and_not_what_is_drawn() -> None:
    view, found = two_ranks(), []
    for charts in (table.CHARTS, table.CHARTS[::-1]):
        table.CHARTS[:] = charts
        traces, layout = drawn(view)
        axes = {
            name: str({**axis, "anchor": "", "overlaying": "", "matches": ""})
            for name, axis in layout.items()
            if "axis" in name
        }
        lines = [
            (axes["xaxis" + trace.xaxis[1:]], axes["yaxis" + trace.yaxis[1:]], trace.name, str(trace.y))
            for trace in traces
        ]
        titles = [(note["text"], note["x"], note["y"]) for note in layout["annotations"]]
        found.append((sorted(lines), sorted(titles), len(layout["shapes"]), layout["height"]))
    assert found[0] == found[1]


def test_no_two_charts_are_at_the_same_place() -> None:
    taken = [
        (place.row + row, place.column + column)
        for place in (chart.place for chart in table.CHARTS)
        for row, column in itertools.product(range(place.rows), range(place.span))
    ]
    assert len(taken) == len(set(taken))


def test_the_loss_on_the_validation_data_is_drawn_beside_that_of_training() -> None:
    found = [Evaluation(step, loss, {}, 9, 0.1, MIB, 1, 0.0) for step, loss in ((2, 0.75), (4, 0.5))]
    before = two_ranks()
    traces, layout = drawn(dataclasses.replace(before, evaluations=found))
    trained, validated = [trace for trace in traces if trace.name in ("loss", "validation")]
    assert (list(validated.x), list(validated.y)) == ([2, 4], [0.75, 0.5])
    assert (validated.xaxis, validated.yaxis) == (trained.xaxis, trained.yaxis)
    assert "Loss, eval" in words_of(layout)
    assert "Loss" in words_of(drawn(before)[1])


def test_the_learning_rate_and_the_loss_scale_are_thin_lines_with_axes_of_their_own_where_they_say_something() -> None:
    def thin(**changed: list[Any]) -> tuple[list[Any], list[str]]:
        rows = [
            [sample(step, rank, **{name: row[step - 1] for name, row in changed.items()}) for step in range(1, 5)]
            for rank in range(2)
        ]
        view = View.of([info(0), info(1)], [reading(), reading()], rows, lambda _: Settings())
        traces, layout = drawn(view)
        lines = [trace for trace in traces if trace.name in ("learning rate", "loss scale")]
        loss = next(trace for trace in traces if trace.name == "loss")
        axes = [layout["yaxis" + line.yaxis[1:]] for line in lines]
        assert [(axis["overlaying"], axis["visible"]) for axis in axes] == [(loss.yaxis, False)] * 2
        assert len({loss.yaxis, *(line.yaxis for line in lines)}) == 3
        return [list(line.y) for line in lines], words_of(layout)

    assert thin()[0] == thin(learning_rate=[0.1] * 4)[0] == [[], []]
    lines, titles = thin(learning_rate=[0.1, 0.2, 0.2, 0.1], loss_scale=[1024.0, 512.0, 512.0, 512.0])
    assert lines == [[0.1, 0.2, 0.2, 0.1], [1024.0, 512.0, 512.0, 512.0]]
    assert "Loss, learning rate" in titles


def test_charts_over_steps_are_zoomed_together_and_show_the_latest_steps_when_asked() -> None:
    steps = range(1, 301)
    by_rank = [[sample(step, 0, samples_per_s=100.0 + 50 * (step % 2), loss=1 / step) for step in steps]]
    by_rank[0][10] = dataclasses.replace(by_rank[0][10], settings_id=2)
    settings = {1: Settings(), 2: Settings(precision="bf16")}
    all_steps = View.of([info(0)], [reading()], by_rank, settings.get)
    choice = Choice(latest=True, smooth=True, log_loss=True)
    latest = View.of([info(0)], [reading()], by_rank, settings.get, choice=choice)
    assert (len(all_steps.marks), latest.marks) == (2, []), "flips before these steps are not in sight"
    charts = Charts([info(0)])
    layout = charts.figure.layout
    charts.update(all_steps)
    assert layout.xaxis3.matches == layout.xaxis4.matches == "x2"
    assert [layout[f"xaxis{number}"].showticklabels for number in (2, 3, 4, 5)] == [False, True, True, True]
    [speed] = [trace for trace in charts.figure.data if trace.name == "all ranks"]
    assert (speed.x[0], speed.x[-1], np.ptp(speed.y)) == (1, 300, 50)
    charts.update(latest)
    assert (speed.x[0], speed.x[-1]) == (201, 300)
    assert np.ptp(speed.y[-50:]) < 10
    assert charts.figure.to_dict()["layout"]["yaxis4"]["type"] == "log"
    charts.update(all_steps)
    assert charts.figure.to_dict()["layout"]["yaxis4"]["type"] == "linear"


def test_the_peak_that_was_too_high_is_drawn_over_the_limit_as_long_as_it_is_in_sight() -> None:
    by_rank, readings = [[sample(1, 0)]], [reading()]
    limit = readings[0].limit_bytes
    assert limit
    failure = Failure(0, "oom", "forward", "", asked_bytes=3 * MIB, free_bytes=MIB)
    attempt = Attempt.of(Rescue(failure, 2, Settings()), readings)
    assert attempt == Attempt(2, limit + 2 * MIB)

    def markers(attempt: Attempt | None) -> tuple[list[float], list[float]]:
        view = View.of([info(0)], readings, by_rank, lambda _: None, attempt=attempt)
        traces, layout = drawn(view)
        (of_attempt,) = (trace for trace in traces if trace.name == "out of memory")
        return list(of_attempt.y or ()), layout["yaxis2"]["range"]

    seen, whole = markers(attempt)
    assert seen == [limit / MIB + 2]
    assert whole[1] > seen[0]
    assert markers(Attempt(1, 100 * limit)) == markers(None)
    unknown = Failure(0, "oom", "forward", "CUDA out of memory")
    assert Attempt.of(Rescue(unknown, 2, Settings()), readings) is None


def test_no_numbers_are_made_up_before_a_step_was_done() -> None:
    view = View.before([info(0)])
    _, layout = drawn(view)
    assert [layout[f"yaxis{number}"]["showticklabels"] for number in (2, 3, 4)] == [False] * 3
    assert "no step yet" in [note["text"] for note in layout["annotations"]]
    assert drawn(two_ranks())[1]["yaxis2"]["showticklabels"] is True


def test_a_limit_far_above_the_bars_is_told_in_words_that_do_not_change_with_them() -> None:
    far = [View.of([info(0)], [reading(peak * MIB, 96 * 64 * MIB)], [[]], lambda _: None) for peak in (16, 40)]
    told = [[note["text"] for note in drawn(view)[1]["annotations"] if "limit" in note["text"]] for view in far]
    assert told == [["limit ↑<br>6.0 GiB<br>off this chart"]] * 2


def test_what_no_page_has_drawn_is_sent_again_whole_and_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    view, sent = two_ranks(), []
    charts = Charts(view.ranks)

    def send(restyle_data: Any, relayout_data: Any, **_: Any) -> None:
        sent.append((now_s, restyle_data, relayout_data))

    monkeypatch.setattr(charts.figure, "_send_update_msg", send)
    monkeypatch.setattr(type(charts.figure), "acknowledged", property(lambda figure: drawn_by_a_page))
    drawn_by_a_page = True
    charts.look_after()
    assert not sent, "nothing was shown yet that could have been lost"
    charts.update(view)
    sent.clear()
    drawn_by_a_page = False
    for second in range(200):
        now_s = float(second)
        charts.look_after()
        if second % 10 == 5:
            charts.update(dataclasses.replace(view, marks=[]) if second % 20 == 5 else view)
    traces = len(charts.figure.data)
    whole = [one for one in sent if len(one[1].get("x", ())) == traces]
    assert [at_s for at_s, _, _ in whole] == [2, 6, 14, 30, 62, 122, 182]
    assert list(whole[0][1]["x"][-2]) == [1, 2, 3, 4], "all points"
    assert {"annotations", "shapes", "yaxis2.range"} <= set(whole[0][2]), "and all that changes of the layout"
    drawn_by_a_page = True
    sent.clear()
    charts.look_after()
    charts.look_after()
    assert len(sent) == 1, "once more when a page answers: it may have missed what came before"


def test_words_of_marks_cover_no_other_and_those_without_a_place_are_left_out() -> None:
    events = [dataclasses.replace(sample(step, 0), settings_id=step) for step in range(1, 9)]
    events.append(sample(200, 0, settings_id=8))
    view = View.of([info(0)], [reading()], [events], lambda number: Settings(batch_size=8 * number))
    _, layout = drawn(view)
    words = [note for note in layout["annotations"] if note["text"].startswith("batch ")]
    assert len(view.marks) == 7
    assert len(words) == 3, "seven within as many steps of two hundred: one on each level"
    assert len({note["y"] for note in words}) == 3
    assert words[0]["hovertext"] == "step 8: batch 64"
    assert len([shape for shape in layout["shapes"] if shape["xref"] == "x2"]) >= 7, "the lines are all there"


def test_what_could_not_be_drawn_is_sent_with_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def fails_once(_: Any, points: Any, layout: Any) -> None:
        sent.append(layout)
        if len(sent) == 1:
            raise RuntimeError("half way")

    monkeypatch.setattr(LiveFigure, "plotly_update", fails_once)
    view = two_ranks()
    charts = Charts(view.ranks)
    with pytest.raises(RuntimeError):
        charts.update(view)
    charts.update(view)
    assert sent[0] == sent[1] != {}
    charts.update(view)
    assert sent[2] == {}


def test_before_anything_was_measured_every_trace_is_there_and_empty() -> None:
    for ranks in (1, 9):
        view = View.before([info(rank) for rank in range(ranks)])
        charts = Charts(view.ranks)
        charts.update(view)
        assert all(len(trace.x) == len(trace.y) == 0 for trace in charts.figure.data)


def test_the_time_of_a_step_is_drawn_in_its_parts() -> None:
    rows = [[sample(step, rank, times=waits(0.02 + 0.02 * rank)) for step in range(1, 9)] for rank in range(2)]
    traces, layout = drawn(View.of([info(0), info(1)], [reading(), reading()], rows, lambda _: Settings()))
    bands = {trace.name: list(trace.y) for trace in traces if getattr(trace, "stackgroup", "") == "time"}
    assert list(bands) == list(PARTS)
    assert bands["reduction"] == pytest.approx([30] * 8), "the mean of 20 and 40 ms"
    assert bands["forward"] == pytest.approx([70] * 8)
    assert bands["update"] == pytest.approx([0] * 8)
    notes = [note["text"] for note in layout["annotations"]]
    assert "<b>Step, ms</b>" in notes
    assert [note.split("</span> ")[1] for note in notes if "</span>" in note and note.endswith("%")] == [
        "forward 70 %",
        "reduction 30 %",
    ], "the parts that take longest are named beside them, from the bottom up"


class Meddling(list[int]):
    """Of a figure's layout; when it is read another thread changes the figure, if it may."""

    def __init__(self, figure: Any, other: Executor) -> None:
        super().__init__([1])
        self._figure, self._other = figure, other
        self.changes: list[Future[None]] = []

    def __iter__(self) -> Iterator[int]:
        self.changes.append(self._other.submit(self._figure.plotly_update, {}, {"title.text": "more"}))
        wait(self.changes, timeout=1)
        return super().__iter__()

    def __reduce_ex__(self, protocol: object) -> Any:
        return list, (list(self),)


@pytest.mark.parametrize("read", [LiveFigure.__repr__, LiveFigure.get_state])
def test_a_figure_that_changes_can_be_shown_and_loaded_again_meanwhile(read: Callable[[LiveFigure], object]) -> None:
    figure = Charts(two_ranks().ranks).figure
    with ThreadPoolExecutor() as other:
        meddling = Meddling(figure, other)
        figure.layout._props["meta"] = meddling
        assert read(figure)
    for change in meddling.changes:
        change.result()


def test_hovering_over_the_speed_of_slow_steps_does_not_say_0() -> None:
    [trace] = [trace for trace in Assembly([info(0)]).traces if trace.name == "all ranks"]
    assert trace.hovertemplate.endswith("%{y:,.2~f}")  # plotly's: two decimals, without zeros at the end


def named(view: View, axis: str) -> dict[str, float]:
    """What is written beside a chart, with its height in the chart's unit."""
    notes = drawn(view)[1]["annotations"]
    beside = [
        note for note in notes if note["xref"] == f"{axis} domain" and note["x"] == 1 and "</span>" in note["text"]
    ]
    return {note["text"].split("</span> ")[1]: note["y"] for note in beside}


def test_the_three_largest_categories_and_the_limit_are_named_beside_the_peaks() -> None:
    names = named(two_ranks(), "x2")
    assert list(names) == ["parameters 4", "optimizer state 8", "activations 20", "limit 96"], "from the bottom up"
    apart = np.diff(list(names.values()))
    height = drawn(two_ranks())[1]["yaxis2"]["range"][1]
    assert (apart >= 0.99 * 14 / 150 * height).all(), "a line each"
    assert names["limit 96"] == 96


def test_names_that_would_lie_above_the_chart_are_moved_down() -> None:
    labels = [Label(f"{place}", 9.9, "#000") for place in range(4)]
    notes = beside(labels, Axes("x", "y"), (0, 10), 100)
    heights = [note["y"] for note in notes]
    assert heights == sorted(heights)
    assert heights[-1] <= 10 - 0.7 + 1e-9
    assert (np.diff(heights) >= 1.4 - 1e-9).all()


def test_hovering_shows_every_series_at_the_cursor_under_the_step_or_the_rank() -> None:
    layout = Assembly([info(0), info(1)]).first_layout()
    assert layout["hovermode"] == "x unified"
    assert layout["xaxis"]["unifiedhovertitle"]["text"] == "rank %{x}"
    assert {layout[f"xaxis{number}"]["unifiedhovertitle"]["text"] for number in (2, 3, 4, 5)} == {"step %{x}"}


def test_each_rank_has_its_peak_as_a_number_over_its_bar() -> None:
    notes = drawn(two_ranks())[1]["annotations"]
    assert [(note["x"], note["text"]) for note in notes if note["xref"] == "x"] == [("0", "40"), ("1", "40")]


def peaks_of(sizes: list[int], scale: float = 1.0) -> View:
    """Return a view of a step of ranks with these peaks in MiB, whose ledgers are so many times as large as usual."""
    steps = [[sample(1, rank, ledger(scale * size / 40))] for rank, size in enumerate(sizes)]
    readings = [reading(round(scale * size * MIB), None) for size in sizes]
    return View.of([info(rank) for rank in range(len(sizes))], readings, steps, lambda _: Settings())


def test_of_more_ranks_than_have_room_for_numbers_the_worst_one_has_one() -> None:
    notes = drawn(peaks_of([40, 40, 60, 40]))[1]["annotations"]
    assert [(note["x"], note["text"]) for note in notes if note["xref"] == "x"] == [("2", "60")]


def test_sizes_are_never_told_as_powers_of_ten() -> None:
    assert list(named(peaks_of([1600]), "x2")) == ["parameters 160", "optimizer state 320", "activations 800"]
    large = peaks_of([1600, 1500])
    assert list(named(large, "x2"))[-1] == "activations 800"
    notes = drawn(large)[1]["annotations"]
    assert [note["text"] for note in notes if note["xref"] == "x"] == ["1600", "1500"]


def test_what_is_too_little_to_be_seen_is_not_named() -> None:
    sizes = {name: 0 for name in CATEGORIES} | {"parameters": 1, "activations": 20_000}
    step = sample(1, 0, ledger(**sizes))
    view = View.of([info(0)], [reading(20_001 * MIB, None)], [[step]], lambda _: Settings())
    assert list(named(view, "x2")) == ["activations 19.5"]
