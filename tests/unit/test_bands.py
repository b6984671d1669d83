"""What the panel draws and says of the ranks' peaks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from gpumem_nb.kernel.history import History
from gpumem_nb.shared import categories as c
from gpumem_nb.shared.messages import Sample
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Handles
from gpumem_nb.ui import legend, style, wording
from gpumem_nb.ui.charts import Charts, View
from gpumem_nb.ui.series import MOST_LEDGERS, above_median, bands, peaks, shown, worst_first
from tests.ledgers import MIB, info, ledger, reading, sample


def trained(ranks: int, steps: int, every: int = 20, higher: int | None = None) -> list[list[Sample]]:
    """Ranks that were recorded every so many steps; one of them may need 30 MiB of activations, not 20."""
    return [
        [
            sample(step, rank, ledger(activations=30 if rank == higher else 20) if step % every == 1 else None)
            for step in range(1, steps + 1)
        ]
        for rank in range(ranks)
    ]


def test_a_peak_is_known_by_its_ledger_only_under_the_settings_of_now() -> None:
    looked, later, flipped = sample(1, 0, ledger(2.0)), sample(2, 0), sample(3, 0, settings_id=2, live_peak_bytes=7)
    by_rank = [[looked, later], [looked, later, flipped], [], [looked, sample(2, 0, ledger(9.0), event="oom")]]
    found = peaks(by_rank, [reading(), None, None, reading()])
    assert [(peak.rank, peak.bytes, peak.ledger is not None) for peak in found] == [
        (0, 80 * MIB, True),
        (1, 7, False),
        (3, 80 * MIB, True),
    ]
    assert [(peak.rank, peak.bytes, peak.ledger) for peak in peaks([[]], [reading(5)])] == [(0, 5, None)]


def test_the_worst_rank_is_by_share_of_its_limit_and_stays_the_same_among_equals() -> None:
    by_rank = [[sample(1, 0, live_peak_bytes=40 * MIB)], [sample(1, 1, live_peak_bytes=30 * MIB)]]
    found = peaks(by_rank, [reading(limit=96 * MIB), reading(limit=32 * MIB)])
    assert worst_first(found)[0].rank == 1
    alike = [[sample(1, rank, live_peak_bytes=40 * MIB + rank)] for rank in range(3)]
    assert [peak.rank for peak in worst_first(peaks(alike, [reading()] * 3))] == [0, 1, 2]


def test_bands_hold_from_one_step_that_was_recorded_to_the_next_and_to_the_latest() -> None:
    [samples] = trained(1, 50)
    seen = bands(samples)
    assert list(seen.step) == [1, 21, 41, 50]
    assert seen.live.shape == (len(c.CATEGORIES), 4)
    assert list(seen.live.sum(axis=0)) == [40 * MIB] * 4
    assert bands(samples[1:5]).step.size == 0


@pytest.mark.parametrize(
    ("band", "before", "after"),
    [(c.ACTIVATIONS, 20, 11), (c.OPTIMIZER_STATE, 8, 0), (c.GRADIENTS, 2, 4)],
)
def test_a_flip_moves_its_band_at_its_step_and_no_other(band: str, before: int, after: int) -> None:
    changed = {band.replace(" ", "_"): after}
    [samples] = trained(1, 30)
    samples += [sample(31, 0, ledger(**changed), settings_id=2, event="flip"), sample(32, 0, settings_id=2)]
    seen = bands(samples)
    moved = {
        name: (row[-3] / MIB, row[-2] / MIB)
        for name, row in zip(c.CATEGORIES, seen.live, strict=True)
        if row[-3] != row[-2]
    }
    assert moved == {band: (before, after)}
    assert list(seen.step[-2:]) == [31, 32]


def test_points_stay_bounded_however_many_steps_were_recorded() -> None:
    [samples] = trained(1, 3000, every=2)
    assert bands(samples).step.size <= MOST_LEDGERS + 2


def test_many_ranks_are_drawn_as_three_with_one_bounded_message(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {}
    for ranks in (8, 64):
        by_rank, readings = trained(ranks, 300, higher=ranks - 2), [reading()] * ranks
        infos = [info(rank) for rank in range(ranks)]
        charts = Charts(infos)
        sent: list[tuple[dict[str, Any], dict[str, Any]]] = []
        monkeypatch.setattr(charts.figure, "plotly_update", lambda *what, to=sent: to.append(what))
        view = View.of(infos, readings, by_rank, lambda settings_id: None)
        charts.update(view)
        [(data, _)] = sent
        assert len(data["x"]) == len(data["y"]) == len(charts.figure.data)
        sizes[ranks] = sum(len(values) for values in data["y"])
    assert sizes[64] < sizes[8]
    assert list(shown(view.peaks)) == ["62", "31", "63"]
    lines = {trace.name: y for trace, y in zip(charts.figure.data, data["y"], strict=True)}
    assert max(lines["highest rank"]) == 50
    assert max(lines["lowest rank"]) == 40


def test_stacks_bands_and_key_have_one_look_and_one_order() -> None:
    figure = Charts([info(0), info(1)]).figure
    stacked = [trace for trace in figure.data if trace.type == "bar" and trace.name in c.CATEGORIES]
    area = [trace for trace in figure.data if trace.type == "scatter" and trace.stackgroup == "peak"]
    assert [trace.name for trace in stacked] == [trace.name for trace in area] == list(c.CATEGORIES)
    for bar, band in zip(stacked, area, strict=True):
        assert bar.marker.color == band.fillcolor == style.LOOKS[bar.name].colour
        assert bar.marker.pattern.shape == band.fillpattern.shape
    html = legend.key(peaks([[sample(1, 0, ledger())]], [reading()])[0], None)
    places = [html.index(f"</i>{name} ") for name in c.CATEGORIES]
    assert places == sorted(places, reverse=True), "from the top of the stack to its bottom"
    assert "activations <b>50.0 %</b> 20.0 MiB" in html


def test_no_two_categories_look_the_same_and_none_looks_like_a_limit() -> None:
    looks = list(style.LOOKS.values())
    assert len(set(looks)) == len(c.CATEGORIES)
    assert style.VERMILION not in {look.colour for look in looks}
    neighbours = itertools.pairwise(looks)
    assert all(one.colour != other.colour or one.pattern != other.pattern for one, other in neighbours)


def test_the_strip_is_for_many_ranks_and_frames_those_that_stand_out() -> None:
    few = peaks(trained(8, 2), [reading()] * 8)
    assert legend.strip(few) == ""
    many = peaks(trained(64, 2, higher=17), [reading()] * 64)
    html = legend.strip(many)
    assert html.count("<i ") == 64
    assert html.count("gpumem-higher") == 1
    assert "title='rank 17: 50.0 MiB, 52 %'" in html
    assert above_median(many[17], many) == pytest.approx(0.25)
    assert above_median(many[16], many) == 0
    alike = legend.strip(peaks(trained(64, 2), [reading()] * 64))
    assert "gpumem-higher" not in alike


def history(*tried: Settings, peak_mib: tuple[int, ...] = ()) -> History:
    """Settings that were tried in this order, each with its peak."""
    kept = History(1)
    for number, settings in enumerate(tried, start=1):
        kept.begin(number, "digits", settings)
        if number <= len(peak_mib):
            kept.tried[-1].add([sample(1, 0, live_peak_bytes=peak_mib[number - 1] * MIB)])
    return kept


def says(tried: History, blocks: int = 4, **changed: int) -> str:
    return wording.filling(peaks([[sample(1, 0, ledger(**changed))]], [reading()]), tried, Handles(blocks))


def test_the_biggest_category_is_named_with_what_may_free_some_of_it() -> None:
    assert says(history(Settings())) == (
        "Activations fill 50 % of the peak (20.0 MiB of 40.0 MiB), in forward of blocks.3. "
        "checkpointing=blocks or precision=bf16 may free some of it."
    )


@pytest.mark.parametrize(
    ("settings", "changed", "blocks", "hint"),
    [
        (Settings(checkpointing="blocks"), {}, 4, "precision=bf16 or batch_size=16 accumulation_steps=2 may free"),
        (Settings(), {}, 0, "precision=bf16 or batch_size=16 accumulation_steps=2 may free"),
        (Settings(precision="bf16", checkpointing="sqrt"), {}, 4, "batch_size=16 accumulation_steps=2 may free"),
        (Settings(), {"optimizer_state": 99}, 4, "optimizer=adamw8bit or optimizer=adafactor may free"),
        (Settings(optimizer="sgd"), {"optimizer_state": 99}, 4, "Fewer trained weights need less of it: freeze"),
        (Settings(), {"gradients": 99}, 4, "No knob changes what the gradients take"),
        (Settings(accumulation_steps=2), {"gradients": 99}, 4, "accumulation_steps=1 may free"),
        (Settings(), {"parameters": 99}, 4, "a smaller model does"),
        (Settings(), {"other": 99}, 4, "look for tensors that cells"),
        (Settings(batch_size=1), {"inside_operators": 99}, 4, "precision=bf16 may free"),
    ],
)
def test_only_knobs_that_are_not_used_yet_are_named(
    settings: Settings, changed: dict[str, int], blocks: int, hint: str
) -> None:
    text = says(history(settings), blocks, **changed)
    assert hint in text
    assert f"checkpointing={settings.checkpointing}" not in text
    assert f"precision={settings.precision}" not in text


def test_where_no_knob_helps_the_biggest_category_the_next_one_gets_a_hint() -> None:
    small = Settings(fusion_threshold_mib=2)
    text = says(history(small), communication=30)
    assert "Communication fills 43 % of the peak" in text
    assert (
        "No knob changes how many gradients are on their way at once. Activations: 29 %; checkpointing=blocks" in text
    )
    alone = small.replace(optimizer="sgd", batch_size=1)
    assert "Optimizer state: " not in says(history(alone), communication=900)
    assert "fusion_threshold_mib=4 may free some of it." in says(history(Settings()), communication=30)


def test_what_was_tried_is_told_as_measured_and_left_out_where_it_did_not_help() -> None:
    tried = history(Settings(checkpointing="blocks"), Settings(precision="bf16"), Settings(), peak_mib=(25, 41, 40))
    text = says(tried)
    assert "checkpointing=blocks had a peak of 25.0 MiB when it was tried." in text
    assert "bf16" not in text
    assert "batch_size=16 accumulation_steps=2 may free some of it." in text


def test_a_rank_that_stands_out_is_named_with_how_much_more_it_needs() -> None:
    found = peaks(trained(4, 2, higher=2), [reading()] * 4)
    text = wording.filling(found, history(Settings()), Handles(4))
    assert "of rank 2's peak" in text
    assert "It needs 25 % more than the median rank." in text


def test_before_a_step_was_recorded_it_says_what_is_known() -> None:
    text = wording.filling(peaks([[sample(1, 0)]], [reading()]), history(Settings()), Handles(4))
    assert text == "Rank 0 peaks at 40.0 MiB, 42 % of its limit. Its categories are not known yet."
    charts = Charts([info(0)])
    charts.update(View.of([info(0)], [reading()], [[sample(1, 0)]], lambda settings_id: None))
    unknown = next(trace for trace in charts.figure.data if trace.name == "categories not known yet")
    assert list(unknown.y) == [40]
    assert all(
        np.isnan(trace.y).all() for trace in charts.figure.data if trace.type == "bar" and trace.name in style.LOOKS
    )
    assert wording.filling([], history(), Handles()) == ""
