"""Runs in files: for other programs, for other people, and for a session to come."""

from __future__ import annotations

import json
import os
import sys
import types
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gpumem_nb.kernel.record import Record
from gpumem_nb.report.runs import Row, Runs
from gpumem_nb.report.runs.columns import latest
from gpumem_nb.report.runs.files import ImportedRuns, packed, readable, unpacked
from gpumem_nb.shared.errors import InvalidInput, SetupError, StateFileError
from gpumem_nb.shared.knobs import KNOBS, Knob, register
from gpumem_nb.shared.settings import Settings
from gpumem_nb.ui.figures import comparison_figure
from tests.ledgers import MIB, info, ledger
from tests.runs import cells, history_of, runs_of, shown, train

GIB = 2**30
HOSTILE = "best, \"so far\"\n<script>alert('x')</script> =1+1"


@pytest.fixture
def record() -> Record:
    history = history_of()
    train(history, Settings(), [2.0, 1.5] * 150, recorded=ledger(), rates=(300.0, 330.0))
    train(history, Settings(batch_size=64, clip_norm=1.0, fusion_threshold_mib=8), [1.0] * 10)
    train(history, Settings(batch_size=640), [])
    history.tried[-1].outcome = "oom"
    record, runs = runs_of(history)
    runs.note(2, HOSTILE)
    return record


def test_a_later_session_has_the_same_figures(record: Record) -> None:
    there = shown(record)
    later, _ = runs_of()
    assert later.bring(unpacked(packed(record.rows()))[0], "digits.state") == 3
    history = history_of()
    later.follow(history, info())
    history.started_s += 1
    train(history, Settings(), [1.0] * 10)
    here = shown(later)
    assert [(row.number, row.came_from) for row in here] == [
        *((1, "digits.state"), (2, "digits.state"), (3, "digits.state"), (4, ""))
    ]
    assert not any(row.present for row in here.rows[:3])
    same = ["run", "best", "present", "came_from", "loss_at_equal_samples", "loss_samples"]
    before, after = (runs.frame().drop(columns=same).iloc[:3] for runs in (there, here))
    pd.testing.assert_frame_equal(before, after, check_dtype=False)
    a, b = there[1], here[1]
    assert (list(a.curve.steps), list(a.curve.samples)) == (list(b.curve.steps), list(b.curve.samples))
    assert list(b.curve.losses) == pytest.approx(list(a.curve.losses))
    assert there.compare(1, 2).why == here.compare(1, 2).why
    assert later.bring(record.rows(), "again.state") == 0, "they are there already"


def test_a_real_gpu_is_kept_with_its_memory_and_driver() -> None:
    gpu = info(device_name="NVIDIA H1", virtual=False, memory_limit=80 * GIB, driver="580.65.06")
    record = Record()
    for number, rank in enumerate((gpu, replace(gpu, driver="575.1"), info(device_name="virtual GPU (96.0 MiB)"))):
        history = history_of()
        history.started_s += number
        record.follow(history, rank)
        train(history, Settings(), [1.0] * 10)
    later, _ = runs_of()
    later.bring(unpacked(packed(record.rows()))[0], "a.state")
    for runs in (shown(record), shown(later)):
        frame = runs.frame()
        assert list(frame.driver) == ["580.65.06", "575.1", ""]
        assert list(frame.device_memory_bytes) == [80 * GIB, 80 * GIB, 96 * MIB]
        assert cells(runs, "device") == [
            *("NVIDIA H1, 80.0 GiB, driver 580.65.06", "NVIDIA H1, 80.0 GiB, driver 575.1", "virtual GPU (96.0 MiB)")
        ]
        assert "driver 580.65.06 → NVIDIA H1, 80.0 GiB, driver 575.1" in runs.compare(1, 2).changed
    alone = Runs([record.rows()[0]])
    assert "2 ranks, NVIDIA H1, 80.0 GiB, driver 580.65.06." in str(alone)
    old = record.rows()[0].saved()
    del old["driver"], old["device_memory_bytes"]
    assert (Row.from_saved(old).on, Row.from_saved(old).device_memory_bytes) == ("NVIDIA H1", None)


def test_of_two_files_that_of_more_steps_says_how_a_run_went_on(record: Record) -> None:
    long = record.rows()
    short = [replace(row, steps=row.steps // 2, note="") for row in long]
    later, _ = runs_of()
    assert later.bring(short, "early.state") == 3
    later.note(short[0].key, "mine")
    assert later.bring(long, "late.state") == 0
    assert [(row.number, row.steps, row.came_from) for row in later.rows()] == [
        *((1, 300, "late.state"), (2, 10, "late.state"), (3, 0, "early.state"))
    ]
    assert later.rows()[0].note == "mine"
    later.bring(short, "early.state")
    assert later.rows()[0].steps == 300
    later.bring([replace(row, note="written since") for row in long], "noted.state")
    assert [row.note for row in later.rows()] == ["mine", " ".join(HOSTILE.split()), "written since"], (
        "words of a file are kept"
    )
    assert [row.came_from for row in later.rows()] == ["late.state", "late.state", "early.state"]
    record.bring([replace(row, steps=row.steps + 1) for row in long], "other.state")
    assert record.rows()[0].steps == 300, "what this session measured itself stays"


def test_of_more_rows_than_a_file_holds_those_that_began_last_are_kept(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [replace(row, began_s=row.began_s - row.number) for row in record.rows()]
    monkeypatch.setattr("gpumem_nb.report.runs.files._MOST_ROWS", 2)
    found, unread = unpacked(packed(rows))
    assert (unread, len(found)) == (0, 2)
    assert [row.key for row in found] == [row.key for row in latest(rows, 2)]


def test_what_comes_later_changes_no_number(record: Record) -> None:
    other = history_of()
    other.started_s += 5
    train(other, Settings(batch_size=2), [1.0] * 10)
    record.bring(runs_of(other)[1].rows, "other.state")
    found = [(row.number, row.came_from) for row in record.rows()]
    assert found == [(1, ""), (2, ""), (3, ""), (4, "other.state")]


def test_runs_of_another_version_are_read_as_far_as_they_are_known(record: Record) -> None:
    saved = json.loads(zlib.decompress(packed(record.rows())))
    first, second, third = saved["rows"]
    first["settings"]["knob_of_tomorrow"] = 3
    first["figure_of_tomorrow"] = 4
    second["settings"]["precision"] = "fp4"
    third["ranks"] = 0
    rows, unread = unpacked(zlib.compress(json.dumps(saved).encode()))
    assert str(ImportedRuns(Path("x.state"), 1, unread)) == (
        "1 run came from x.state. 2 runs of it cannot be read: damaged, or of a newer gpumem_nb."
    )
    assert [row.key for row in rows] == [first["key"]], "others would show what is not so"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *(("samples", values) for values in ([float("nan"), 2], [1, float("inf")], [2, 2], [0, 1], [-2, -1])),
        *(("steps", values) for values in ([float("nan"), 2], [2, 1], [0, 1])),
        ("live_peaks", [1, float("inf")]),
    ],
)
def test_a_curve_that_cannot_be_is_not_taken_in(record: Record, name: str, values: list[float]) -> None:
    saved = json.loads(zlib.decompress(packed(record.rows())))
    good = {"steps": [1, 2], "samples": [8, 16], "losses": [float("nan"), 1], "rates": [1, 1], "live_peaks": [1, 1]}
    first, second, third = saved["rows"]
    first["curve"], second["curve"] = good, good | {name: values}
    third["curve"] = {name: list(range(1, 1000)) for name in good}
    later, _ = runs_of()
    rows, unread = unpacked(zlib.compress(json.dumps(saved).encode()))
    later.bring(rows, "x.state")
    assert (len(shown(later)), unread) == (1, 2)
    assert str(shown(later))


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"x", zlib.compress(b"[]"), zlib.compress(b'{"rows": 7}'), zlib.compress(b"{}")[:-3]),
        zlib.compress(b"[" * 100_000),  # more levels than Python reads
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(StateFileError, match="record of runs cannot be read"):
        unpacked(data)
    rows, problem = readable(data)
    assert rows == []
    assert bool(problem) == bool(data), "a state may hold none; nothing of it stops a resume"


def test_a_record_of_a_thousand_runs_takes_little_room() -> None:
    history = history_of()
    for size in range(1, 1001):
        train(history, Settings(batch_size=size), [1.0 / size] * 3)
    _, runs = runs_of(history)
    assert len(packed(runs.rows)) < 2**18


def test_csv_has_all_rows_and_what_people_wrote(record: Record, tmp_path: Path) -> None:
    runs = shown(record)
    said = str(runs.export(tmp_path / "runs.csv"))
    assert f"Written: {tmp_path / 'runs.csv'} (" in said
    assert "It has 3 runs" in said
    read = pd.read_csv(tmp_path / "runs.csv")
    assert list(read.columns) == list(runs.frame().columns)
    assert list(read.live_peak_bytes[:2]) == [44 * MIB, 44 * MIB]
    assert read.note[1] == " ".join(HOSTILE.split())
    runs.export(tmp_path / "runs.csv")  # its own file may be written over


@pytest.mark.parametrize("kind", ["csv", "html"])
def test_a_name_that_is_no_text_is_written_nevertheless(record: Record, tmp_path: Path, kind: str) -> None:
    name = os.fsdecode(b"st\xe4nde.gpumem")
    runs = Runs([replace(row, came_from=name) for row in shown(record)])
    runs.export(tmp_path / f"runs.{kind}")
    assert "st\\udce4nde" in (tmp_path / f"runs.{kind}").read_text()


def test_html_is_a_page_of_its_own(record: Record, tmp_path: Path) -> None:
    shown(record).export(tmp_path / "runs.html")
    text = (tmp_path / "runs.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "http" not in text, "nothing is fetched"


@pytest.fixture
def own_knobs() -> Iterator[None]:
    knobs = [Knob(name, default, "", parse=lambda value: value) for name, default in (("a", "all"), ("b", (1, "x")))]
    for knob in knobs:
        register(knob)
    yield
    for knob in knobs:
        del KNOBS[knob.name]


@pytest.mark.usefixtures("own_knobs")
def test_knobs_with_tuples_are_kept_and_sorted(record: Record) -> None:
    history = history_of()
    record.follow(history, info())
    for b in ((2, "y"), (1, "x"), (10, "a"), ((3, 4), "z")):
        train(history, Settings(b=b), [1.0, 2.0])
    runs = shown(record)
    assert len(runs.sorted("b").rows) == len(runs.rows)
    assert runs._repr_html_()
    for row in runs.rows:
        again = Row.from_saved(json.loads(json.dumps(row.saved())))
        assert again.settings.b == row.settings.b


@pytest.mark.usefixtures("own_knobs")
def test_parquet_has_what_the_frame_has_under_every_value_of_a_knob(record: Record, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="make test installs it")
    history = history_of()
    history.started_s += 1
    record.follow(history, info())
    for name, knob in KNOBS.items():
        for value in knob.choices:
            train(history, Settings(**{name: value}), [2.0, None])
    train(history, Settings(a=2, b=(2, "y")), [1.0])
    runs = shown(record)
    runs.export(tmp_path / "runs.parquet")
    read, frame = pd.read_parquet(tmp_path / "runs.parquet"), runs.frame()
    assert list(read.columns) == list(frame.columns)
    assert len(read) == len(frame) > 20
    for name in frame.columns:
        if pd.api.types.is_numeric_dtype(frame[name]):
            pd.testing.assert_series_equal(read[name], frame[name])
        else:
            known = frame[name].notna()
            assert list(read[name].notna()) == list(known), name
            assert list(read[name][known]) == [str(value) for value in frame[name][known]], name
    assert read.note[1] == " ".join(HOSTILE.split())
    runs.export(tmp_path / "runs.parquet")  # its own file may be written over


@pytest.mark.parametrize("why", ["missing", "too old"])
def test_parquet_without_pyarrow_is_refused(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None if why == "missing" else types.ModuleType("pyarrow"))
    if why == "too old":
        monkeypatch.setattr(sys.modules["pyarrow"], "__version__", "1.0.0", raising=False)
    with pytest.raises(SetupError, match=r"pip install -U pyarrow$"):
        shown(record).export(tmp_path / "runs.parquet")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("runs.xlsx", r"ends in \.csv, \.parquet or \.html\.$"),
        ("runs", r"ends in \.csv, \.parquet or \.html\.$"),
        ("nowhere/runs.csv", "there is no such folder"),
        ("theirs.csv", "already exists and is not such a file"),
        ("folder.csv", "this is a folder"),
        (7, "is not a file's path"),
    ],
)
def test_a_file_that_cannot_be_written_changes_nothing(
    record: Record, tmp_path: Path, name: Any, sentence: str
) -> None:
    (tmp_path / "theirs.csv").write_text("a,b\n1,2\n")
    (tmp_path / "folder.csv").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidInput, match=sentence) as caught:
        shown(record).export(tmp_path / name if isinstance(name, str) else name)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInput, match="~runs is not the folder of a user here"):
        shown(record).export("~runs/a.csv")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "theirs.csv").read_text() == "a,b\n1,2\n"
    with pytest.raises(InvalidInput, match="Nothing has been tried yet"):
        runs_of()[1].export(tmp_path / "none.csv")


def test_two_runs_are_drawn_over_each_other(record: Record) -> None:
    runs = shown(record)
    figure = comparison_figure(runs[1], runs[2])
    assert [trace.name for trace in figure.data] == ["run 1", "run 2"] * 3
    assert [len({trace.xaxis for trace in figure.data[place : place + 2]}) for place in (0, 2, 4)] == [1, 1, 1]
    loss, rate, live = figure.data[0], figure.data[2], figure.data[5]
    assert (loss.x[-1], rate.x[-1]) == (300 * 64, 300), "samples of two ranks, and steps"
    assert set(live.y) == {44.0}
    comparison_figure(runs[1], runs[3])  # without a step
