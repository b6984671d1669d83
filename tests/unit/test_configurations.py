"""The configurations that were tried, side by side."""

from __future__ import annotations

from xml.etree import ElementTree

from gpumem_nb.report.configurations import Runs, Tried
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui.runs_picture import picture
from tests.ledgers import MIB, sample


def test_rows_that_differ_in_a_knob_without_a_column_can_be_told_apart() -> None:
    slower, larger = Settings(learning_rate=1e-4), Settings(learning_rate=1e-4, batch_size=64)
    tried = [
        Tried(1, "digits", Settings(), outcome="ok"),
        Tried(2, "other", Settings(precision="bf16"), outcome="ok"),
        Tried(3, "digits", slower, outcome="ok"),
        Tried(4, "digits", larger, outcome="ok"),
    ]
    heading, *rows = str(Runs(tried, size=2)).splitlines()
    place = slice(heading.index("changed"), heading.index("steps"))
    assert [row[place].strip() for row in rows] == ["", "", "lr 0.0001", "batch 64"]


def test_a_picture_of_what_was_tried_needs_no_program() -> None:
    tried = [
        Tried(1, "digits", Settings()),
        Tried(2, "digits", Settings(precision="bf16")),
        Tried(3, "digits", Settings(precision="bf16", batch_size=999), outcome="oom"),
    ]
    for entry, peak in zip(tried, (40 * MIB, 20 * MIB), strict=False):
        entry.add([sample(1, 0, live_peak_bytes=peak)])
    svg = ElementTree.fromstring(picture(tried, 80 * MIB))
    words = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert [words[place] for place in (2, 4, 6)] == ["digits", "bf16", "batch 999"]
    assert words[-1] == "out of memory"
    wide, narrow, none = [float(bar.get("width", "")) for bar in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert (wide, none) == (2 * narrow, 0)
    [limit] = svg.iter("{http://www.w3.org/2000/svg}line")
    first = next(svg.iter("{http://www.w3.org/2000/svg}rect"))
    assert float(limit.get("x1", "")) - float(first.get("x", "")) == 2 * wide
    assert "<line" not in picture(tried, 900 * MIB), "a limit far away would flatten the bars"
