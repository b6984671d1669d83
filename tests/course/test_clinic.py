"""The clinic as it is planted: each case's instrument shows what the notebook says that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_nb.course.lesson import GRADING
from tests.course.notebooks import CHECK, COURSE, read
from tests.course.student import student

pytestmark = [pytest.mark.notebook, pytest.mark.full, pytest.mark.timeout(1500)]

SHOWN = {
    "case-1-doctor": "held by Tensor `average`",
    "case-2-memory": "held by Tensor `losses[",
    "case-3-report": "predictions keep",
    "case-4-symptom": "8 micro-batches: the first weights move by 1",
    "case-5-symptom": "scale 65536.0: the first weights move by 1.1e-05",
    "case-6-check": "512 of 512 samples are seen by several ranks",
    "case-7-check": "0.weight is not the same on rank 1",
    "case-8-doctor": "for 6 weights that are frozen",
    "case-9-steps": "last 2.0 MiB",
    "case-10-train": "Free memory lies in pieces that are too small",
    "case-11-train": "Rank 0 is slowest",
    "case-12-check": "Buffers: 1.running_mean is not the same on rank 1",
}


def test_every_instrument_finds_its_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv(GRADING, raising=False)
    with student(read(COURSE / "clinic.ipynb"), tmp_path) as one:
        said = {cell.id: one.does(cell.source) for cell, _ in one.exercises()}
    assert {name: said[name] for name, words in SHOWN.items() if words not in said[name]} == {}
    assert {name: told for name, told in said.items() if name.startswith(CHECK) and ": not yet." not in told} == {}
