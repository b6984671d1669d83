"""The configurations that were tried, side by side."""

from __future__ import annotations

from gpumem_nb.report.configurations import Runs, Tried
from gpumem_nb.shared.settings import Settings


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
