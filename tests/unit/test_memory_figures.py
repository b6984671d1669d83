"""The figures of a memory report, and what the magic shows where."""

from __future__ import annotations

from typing import Any

import pytest

from gpumem_nb.report.memory import MemoryReport, RankMemory
from gpumem_nb.shared import categories as c
from gpumem_nb.ui import cells, figures, memory_figures
from gpumem_nb.ui.memory_figures import timeline_figure, treemap_figure
from gpumem_nb.ui.style import LOOKS
from tests.ledgers import MIB, info, ledger, reading, timeline


def test_a_recorded_step_is_stacked_categories_with_its_parts_and_its_peak_named() -> None:
    figure = timeline_figure(timeline())
    stacked = [trace for trace in figure.data if trace.type == "scatter"]
    assert [trace.name for trace in stacked] == [name for name in c.CATEGORIES if name != c.CASTS]
    assert {trace.stackgroup for trace in stacked} == {"live"}
    assert all(trace.fillcolor == LOOKS[trace.name].colour for trace in stacked)
    assert sum(trace.y[2] for trace in stacked) == 40
    assert stacked[0].x[-1] == 10.0, "the last state holds until the step's end"
    modules, phases = (next(trace for trace in figure.data if trace.y[0] == row) for row in ("module", "phase"))
    assert list(phases.text) == ["forward", "backward", "reduction", "update"]
    assert list(phases.base) == [0, 5, 8, 9]
    assert list(phases.x) == [5, 3, 1, 1]
    assert list(modules.text) == ["blocks.2.<conv>", "blocks.3", "blocks.3", "", ""]
    [peak] = figure.layout.annotations
    assert (peak.x, peak.y) == (4.0, 40)
    assert "peak 40.0 MiB</b><br>in forward of blocks.3<br>activations 20.0 MiB<br>optimizer state" in peak.text
    assert "(virtual)" in figure.layout.title.text


def test_the_treemap_holds_the_whole_peak_and_every_parent_its_children() -> None:
    [tree] = treemap_figure(ledger(), 3).data
    sizes = dict(zip(tree.ids, tree.values, strict=True))
    assert sizes["peak"] == 40 * MIB
    for node in tree.ids:
        children = [sizes[child] for child, parent in zip(tree.ids, tree.parents, strict=True) if parent == node]
        assert not children or sum(children) == sizes[node]
    assert sizes["peak/blocks/3/activations"] == 10 * MIB
    colours = dict(zip(tree.ids, tree.marker.colors, strict=True))
    assert colours["peak/blocks/3/activations"] == LOOKS[c.ACTIVATIONS].colour


@pytest.mark.parametrize(
    ("by", "timelines", "titles"),
    [
        (None, (), []),
        ("category", (), []),
        ("module", (), ["Peak of rank 0"]),
        (None, (timeline(),), ["Step 7 of rank 0"]),
        ("module", (timeline(),), ["Step 7 of rank 0", "Peak of rank 0"]),
    ],
)
def test_a_notebook_gets_figures_that_stay_without_a_kernel_and_a_terminal_none(
    monkeypatch: pytest.MonkeyPatch, by: str | None, timelines: Any, titles: list[str]
) -> None:
    report = MemoryReport((RankMemory(info(), reading(), ledger()),), by, timelines)
    displayed: list[dict[str, Any]] = []
    monkeypatch.setattr(figures, "display", lambda bundle, raw: displayed.append(bundle))
    memory_figures.show_figures(report)
    assert displayed == []
    monkeypatch.setattr(cells, "get_ipython", lambda: type("Shell", (), {"kernel": object()}))
    memory_figures.show_figures(report)
    assert [bundle["text/plain"][: len(title)] for bundle, title in zip(displayed, titles, strict=True)] == titles
    assert all(bundle["application/vnd.plotly.v1+json"]["data"] for bundle in displayed)
