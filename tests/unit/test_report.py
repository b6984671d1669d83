from __future__ import annotations

import pandas as pd
import pytest

from gpumem_nb.memory.report import MemoryReport, RankMemory
from gpumem_nb.sample import RankInfo, Reading

MIB = 2**20


def rank(number: int, reading: Reading, *, virtual: bool, note: str = "", name: str = "GPU") -> RankMemory:
    device = "cpu" if virtual else f"cuda:{number}"
    return RankMemory(RankInfo(number, number, "here", 1, device, name, virtual, reading.limit, 1, note), reading)


@pytest.fixture
def report() -> MemoryReport:
    return MemoryReport(
        (
            rank(0, Reading(10 * MIB, 20 * MIB, 22 * MIB, 40 * MIB, 22 * MIB, 512 * MIB), virtual=True),
            rank(1, Reading(0, 3 * MIB, None, None, None, None), virtual=False, note="NVML is missing.", name="<A100>"),
        )
    )


def test_frame_has_a_row_per_rank_and_keeps_unknown_apart_from_zero(report: MemoryReport) -> None:
    frame = report.frame()
    assert list(frame["rank"]) == [0, 1]
    assert list(frame["kind"]) == ["virtual", "real"]
    assert list(frame["live_bytes"]) == [10 * MIB, 0]
    assert frame["reserved_peak_bytes"][0] == 40 * MIB
    assert pd.isna(frame["reserved_bytes"][1])
    assert pd.isna(frame["device_used_bytes"][1])
    assert pd.isna(frame["limit_bytes"][1])
    assert list(frame.columns) == [
        *("rank", "host", "device", "kind", "live_bytes", "live_peak_bytes", "reserved_bytes", "reserved_peak_bytes"),
        *("device_used_bytes", "limit_bytes"),
    ]


def test_text_shows_every_number_with_its_name_and_what_could_not_be_read(report: MemoryReport) -> None:
    heading, first, second, *sentences = str(report).splitlines()
    assert [name for name in ("live", "live peak", "reserved", "device used", "limit") if name not in heading] == []
    assert "virtual" in first
    assert "10.0 MiB" in first
    assert "512.0 MiB" in first
    assert "real" in second
    assert second.count("n/a") == 4
    assert "0 B" in second
    assert heading.index("live") + len("live") == first.index("10.0 MiB") + len("10.0 MiB")
    assert "Live is held by tensors" in sentences[0]
    assert sentences[-1] == "NVML is missing."


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
