"""One place for a chart: what is listed in the table is drawn, and nothing else has to know of it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from gpumem_nb.report.evaluation import Evaluation
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui.charts import Charts, View, table
from gpumem_nb.ui.charts.chart import Chart, Drawn, Place
from gpumem_nb.ui.charts.lines import rank_lines
from gpumem_nb.ui.charts.loss import LOSS
from tests.ledgers import MIB, info, ledger, reading, sample


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


def test_a_chart_of_ones_own_is_one_object_and_one_line() -> None:
    live = Chart(
        title=lambda view: f"Live after each step, {view.unit}",
        place=Place(row=2, column=0, span=3),
        traces=lambda view, axes: rank_lines(view, decimals=1),
        draw=lambda view, axes: Drawn(
            [(view.series.step, line / view.unit_bytes) for line in view.series.mean(lambda one: one.live_bytes)]
        ),
    )
    table.register(live)
    view = two_ranks()
    traces, layout = drawn(view)
    first, second = traces[-2:]
    assert [first.name, second.name] == ["rank 0", "rank 1"]
    assert [list(first.x), list(first.y), list(second.y)] == [[1, 2, 3, 4], [9] * 4, [10] * 4]
    assert first.xaxis == second.xaxis == "x6"
    assert layout["xaxis6"]["title"]["text"] == "optimizer step"
    titles = {note["text"]: note["y"] for note in layout["annotations"]}
    bottom, top = layout["yaxis6"]["domain"]
    assert 0 < bottom < top < titles["<b>Live after each step, MiB</b>"] < layout["yaxis3"]["domain"][0]
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


def test_no_two_charts_are_at_the_same_place_and_none_is_beside_the_grid() -> None:
    assert not any(one.place.overlaps(other.place) for one, other in itertools.combinations(table.CHARTS, 2))
    with pytest.raises(ValueError, match=r"cannot be at Place\(row=0, column=0, span=2\): another one is at"):
        table.register(dataclasses.replace(LOSS, place=Place(row=0, column=0, span=2)))
    with pytest.raises(ValueError, match="columns 2 to 3"):
        Place(row=2, column=2, span=2)


def test_the_loss_on_the_validation_data_is_drawn_beside_that_of_training() -> None:
    found = [Evaluation(step, loss, {}, 9, 0.1, MIB, 1, 0.0) for step, loss in ((2, 0.75), (4, 0.5))]
    before = two_ranks()
    traces, layout = drawn(dataclasses.replace(before, evaluations=found))
    trained, validated = [trace for trace in traces if trace.name in ("loss", "validation")]
    assert (list(validated.x), list(validated.y)) == ([2, 4], [0.75, 0.5])
    assert (validated.xaxis, validated.yaxis) == (trained.xaxis, trained.yaxis)
    titles = [note["text"] for note in layout["annotations"]]
    assert "<b>Mean loss, validation (dots)</b>" in titles
    assert "<b>Loss, mean of ranks</b>" in [note["text"] for note in drawn(before)[1]["annotations"]]


def test_a_chart_that_forgets_a_trace_is_named() -> None:
    table.register(dataclasses.replace(LOSS, title=lambda view: "Half", place=Place(2, 0), draw=lambda *_: Drawn([])))
    view = two_ranks()
    with pytest.raises(ValueError, match="'Half' has 2 traces and points for 0"):
        Charts(view.ranks).update(view)


def test_before_anything_was_measured_every_trace_is_there_and_empty() -> None:
    for ranks in (1, 9):
        view = View.before([info(rank) for rank in range(ranks)])
        charts = Charts(view.ranks)
        charts.update(view)
        assert all(len(trace.x) == len(trace.y) == 0 for trace in charts.figure.data)
