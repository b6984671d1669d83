from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path

import pandas as pd
import pytest

from gpumem_nb.report import breakdown
from gpumem_nb.report.breakdown import MOST_PARTS, highest, parts
from gpumem_nb.report.memory import MemoryReport, RankMemory
from gpumem_nb.report.run_summary import Evaluation
from gpumem_nb.report.written import SnapshotRow, Snapshots
from gpumem_nb.shared import categories as c
from gpumem_nb.shared.errors import InvalidInput
from gpumem_nb.shared.messages import ChunkReply, DeviceUse, Evaluated, RankInfo, Reading, Span
from tests.ledgers import MIB, info, ledger, reading, timeline


def rank(number: int, reading: Reading, *, virtual: bool, note: str = "", name: str = "GPU") -> RankMemory:
    device = "cpu" if virtual else f"cuda:{number}"
    return RankMemory(RankInfo(number, number, "here", 1, device, name, virtual, reading.limit_bytes, 1, note), reading)


def known(number: int = 0, scale: float = 1.0, use: DeviceUse | None = None, **changed: int) -> RankMemory:
    made = ledger(scale, **changed)
    return RankMemory(info(number), reading(made.peak_bytes), made, use)


@pytest.fixture
def report() -> MemoryReport:
    return MemoryReport(
        (
            rank(0, Reading(10 * MIB, 20 * MIB, 22 * MIB, 40 * MIB, 22 * MIB, 512 * MIB), virtual=True),
            rank(
                1,
                Reading(0, 3 * MIB, 2 * MIB, 4 * MIB, None, None),
                virtual=False,
                note="NVML is missing.",
                name="<A100>",
            ),
        )
    )


def test_frame_has_a_row_per_rank_and_keeps_unknown_apart_from_zero(report: MemoryReport) -> None:
    frame = report.frame()
    assert list(frame["rank"]) == [0, 1]
    assert list(frame["kind"]) == ["virtual", "real"]
    assert list(frame["live_bytes"]) == [10 * MIB, 0]
    assert frame["reserved_peak_bytes"][0] == 40 * MIB
    assert pd.isna(frame["device_used_bytes"][1])
    assert pd.isna(frame["limit_bytes"][1])
    assert frame["fragmentation_bytes"][0] == 12 * MIB
    assert list(frame.columns) == [
        *("rank", "host", "device", "kind", "live_bytes", "live_peak_bytes", "reserved_bytes", "reserved_peak_bytes"),
        *("fragmentation_bytes", "device_used_bytes", "limit_bytes", "own_bytes", "others_bytes"),
        *("utilisation_percent", "temperature_celsius", "power_watts", "clock_mhz"),
        *("peak_bytes", "peak_phase", "peak_module", "host_peak_bytes", "host_state_bytes"),
    ]


def test_text_shows_every_number_with_its_name_and_what_could_not_be_read(report: MemoryReport) -> None:
    heading, first, second, *sentences = str(report).splitlines()
    assert [name for name in ("live", "live peak", "reserved", "device used", "limit") if name not in heading] == []
    assert "virtual" in first
    assert "10.0 MiB" in first
    assert "512.0 MiB" in first
    assert "real" in second
    assert second.count("n/a") == 2
    assert "0 B" in second
    assert heading.index("live") + len("live") == first.index("10.0 MiB") + len("10.0 MiB")
    assert [sentence.split()[0] for sentence in sentences[1:6]] == ["Live", "Reserved", "Device", "Virtual:", "n/a"]
    assert sentences[6] == "NVML is missing."
    assert "known once a step has been trained" in sentences[-1]


def test_html_says_the_same_escapes_names_and_follows_the_theme(report: MemoryReport) -> None:
    html = report._repr_html_()
    assert "40.0 MiB" in html
    assert "&lt;A100&gt;" in html
    assert "<A100>" not in html
    assert "var(--jp-ui-font-color1" in html
    assert html.count("<tr>") == 3


def test_the_virtual_sentence_is_there_only_for_virtual_ranks() -> None:
    real = MemoryReport((rank(0, Reading(1, 2, 3, 4, 5, 6), virtual=False),))
    assert "Virtual" not in str(real)
    assert "virtual" not in str(real)


def test_a_report_without_ranks_is_only_the_heading() -> None:
    assert len(MemoryReport(()).frame()) == 0
    assert str(MemoryReport(())).startswith("rank")


def test_categories_of_the_worst_rank_add_up_and_are_explained() -> None:
    report = MemoryReport((known(0), known(1, activations=30)))
    text = str(report)
    assert "At the peak of rank 1: 50.0 MiB (virtual) in forward of blocks.3" in text
    assert "activations          30.0 MiB  60.0 %  results of forward that were saved for backward" in text
    assert c.CASTS not in text, "nothing of it was alive"
    frame = report.frame(by="category")
    assert set(frame["category"]) == set(c.CATEGORIES)
    assert dict(frame.groupby("rank")["peak_bytes"].sum()) == {0: 40 * MIB, 1: 50 * MIB}
    assert (frame["rest_bytes"] <= frame["peak_bytes"]).all()


def test_what_is_in_no_category_is_shown_as_such() -> None:
    short = ledger()
    short = dataclasses.replace(short, peak_bytes=short.peak_bytes + 3 * MIB)
    report = MemoryReport((RankMemory(info(), reading(short.peak_bytes), short),))
    assert "not explained         3.0 MiB   7.0 %" in str(report)
    for by in ("category", "module"):
        assert report.frame(by=by)["peak_bytes"].sum() == short.peak_bytes
        assert "not explained" in str(dataclasses.replace(report, by=by))


def test_a_ledger_that_saw_tensors_only_says_so() -> None:
    seen = RankMemory(info(), reading(), dataclasses.replace(ledger(), exact=False, virtual=False))
    assert "Only tensors were seen" in str(MemoryReport((seen,)))
    seen = RankMemory(info(), reading(), dataclasses.replace(ledger(), exact=False, virtual=True))
    assert "four million allocations" in str(MemoryReport((seen,)))
    assert "Only tensors" not in str(MemoryReport((known(),)))


def test_categories_of_all_ranks_stand_side_by_side_and_of_many_the_worst_median_and_best() -> None:
    few = str(MemoryReport(tuple(known(r) for r in range(3)), by="category"))
    assert all(f" rank {r}" in few for r in range(3))
    many = str(MemoryReport(tuple(known(r, activations=20 + r) for r in range(64)), by="category"))
    assert "worst: rank 63" in many
    assert "median: rank 31" in many
    assert "best: rank 0" in many


def test_modules_and_what_belongs_to_none_make_up_the_whole_peak() -> None:
    report = MemoryReport((known(),), by="module")
    text = str(report)
    assert "blocks.3            10.0 MiB  25.0 %  activations 10.0 MiB" in text
    assert "(no module)         16.0 MiB  40.0 %  optimizer state 8.0 MiB, gradients 2.0 MiB" in text
    frame = report.frame(by="module")
    assert frame["peak_bytes"].sum() == 40 * MIB
    assert frame["share"].sum() == pytest.approx(1)
    leaves = tuple((f"blocks.{block}.{name}", c.ACTIVATIONS, MIB) for block in range(10) for name in ("up", "down"))
    deep = dataclasses.replace(ledger(activations=20), modules=leaves)
    text = str(dataclasses.replace(report, ranks=(RankMemory(info(), reading(), deep),)))
    assert "blocks.9         2.0 MiB   5.0 %  activations 2.0 MiB" in text
    assert "up" not in text.partition("At the peak")[2], "the modules of a block count with it"
    assert "&lt;conv&gt;" in report._repr_html_()


def test_a_recorded_step_is_told_part_by_part_with_the_highest_live_bytes_of_each() -> None:
    line = timeline()
    assert [highest(line, span) for span in parts(line)] == pytest.approx(
        [24 * MIB, 40 * MIB, 40 * MIB, 20 * MIB, 4 * MIB], abs=16
    )
    report = MemoryReport((known(),), timelines=(line,))
    text = str(report)
    assert "Step 7 of rank 0, 10 ms while it was recorded" in text
    assert text.count("← peak") == 1
    assert "    3.0  2.0  forward    blocks.3             40.0 MiB  ← peak" in text
    frame = report.frame(by="timeline")
    assert frame["live_bytes"].groupby(frame["time_ms"]).sum().max() == 40 * MIB
    assert list(frame[frame["category"] == c.ACTIVATIONS]["phase"]) == [
        *("forward", "forward", "forward", "backward", "update")
    ]


def test_the_parts_of_a_deep_step_are_joined_until_they_are_few() -> None:
    spans = []
    for block in range(30):
        for moment, name in enumerate(("", ".norm", "", ".mlp", "")):
            begin = block * 10 + moment * 2
            spans.append(Span(begin, begin + 2 - (name == ""), "forward", f"blocks.{block}{name}"))
        spans.append(Span(block * 10 + 9, block * 10 + 9.5, "forward", ""))
    line = dataclasses.replace(timeline(), step_s=0.3, spans=tuple(spans))
    joined = parts(line)
    assert [span.module for span in joined] == [f"blocks.{block}" for block in range(30)]
    assert len(joined) <= MOST_PARTS
    assert str(MemoryReport((known(),), timelines=(line,))).count("forward  blocks.") == 30


def test_a_short_part_is_not_lost_in_one_whose_name_begins_alike() -> None:
    spans = [Span(0.0, 0.5, "forward", "fc"), Span(0.5, 50.0, "forward", "fc2"), Span(50.0, 50.5, "forward", "fc")]
    spans += [Span(50.5, 99.5, "forward", "head.out"), Span(99.5, 100.0, "forward", "head")]
    found = breakdown.joined(spans, 2, shortest_ms=1.0)
    assert [span.module for span in found] == ["fc", "fc2", "fc", "head.out"]


def test_nvml_is_shown_beside_what_it_leaves_unexplained_and_gaps_have_their_reason() -> None:
    why = "this GPU does not tell"
    use = DeviceUse(
        used_bytes=900 * MIB,
        total_bytes=2048 * MIB,
        own_bytes=700 * MIB,
        other_bytes=150 * MIB,
        utilisation_percent=87,
        missing={"temperature_c": why, "power_w": why},
    )
    real = dataclasses.replace(known(2, use=use), info=info(2, virtual=False))
    text = str(MemoryReport((known(0), real)))
    row = next(line for line in text.splitlines() if line.startswith("2 ") and "%" in line)
    assert row.split()[1:11] == [*("900.0", "MiB", "700.0", "MiB", "656.0", "MiB", "150.0", "MiB", "50.0", "MiB")]
    assert row.endswith("87 %          n/a    n/a    n/a")
    assert "n/a: temperature, power of rank 2: this GPU does not tell." in text
    frame = MemoryReport((known(0), real)).frame()
    assert list(frame["utilisation_percent"]) == [pd.NA, 87]


def test_an_unknown_view_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'module'"):
        MemoryReport((), by="modules")
    with pytest.raises(InvalidInput, match="allowed: category, module, timeline"):
        MemoryReport(()).frame(by="x")


def test_the_page_on_memory_explains_every_category_and_measures_it() -> None:
    explained, measured = (Path(__file__).parents[2] / "docs" / "memory.md").read_text().split("<!-- measured -->")
    rows = [line.split("|")[1:] for line in measured.splitlines() if line.startswith("| ")]
    shown = {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    for category in c.CATEGORIES:
        assert f"\n| {category} |" in explained, category
        assert any(size != "0 B" for size in shown[category]), category


def test_snapshots_are_listed_with_model_step_and_age() -> None:
    now = time.time()
    here = SnapshotRow(Path("/a/1.state"), "text-gpt", 1200, 2, now - 3 * 3600, own=True, notebook="a.ipynb", over=True)
    there = SnapshotRow(Path("/b/2.state"), "net", 7, 4, now - 20, own=False, notebook="b.ipynb", over=False)
    found = Snapshots((here, there))
    assert [line.split() for line in str(found).splitlines()[:3]] == [
        ["notebook", "model", "step", "ranks", "age", "path"],
        ["this", "notebook", "text-gpt", "1,200", "2", "3", "hours", "/a/1.state"],
        ["b.ipynb", "(may", "still", "run", "on", "another", "machine)", "net", "7", "4", "just", "now", "/b/2.state"],
    ]
    assert "%hvd_resume goes on from the first." in str(found)
    assert "goes on from the first" not in str(Snapshots((there,)))
    assert str(Snapshots((there,))).endswith("To go on from another one: %hvd_resume PATH")
    assert list(found.frame().steps) == [1200, 7]
    assert "net" not in str(found.of_this_notebook)
    assert str(found.of_this_notebook).endswith("Other notebooks have 1 more: %hvd_resume --list")
    assert str(Snapshots(())) == "There is no automatic snapshot."


def test_a_number_that_some_rank_did_not_give_is_not_known_whichever_rank_that_is() -> None:
    sums = [{"loss": 8.0, "accuracy": 3.0}, {"loss": 8.0, "accuracy": 1.0, "recall": 1.0}, {}]
    shares = [Evaluated(rank, 7, 1.0, 1, 4 if of_rank else 0, of_rank, 0.1, MIB) for rank, of_rank in enumerate(sums)]
    replies = [ChunkReply(one.rank, (), reading(MIB, None), evaluated=one) for one in shares]
    for order in (replies, replies[::-1]):
        found = Evaluation.of_ranks(order)
        assert found is not None
        assert (found.loss, found.samples, found.metrics["accuracy"]) == (2.0, 8, 0.5)
        assert math.isnan(found.metrics["recall"])
