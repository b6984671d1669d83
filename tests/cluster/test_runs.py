"""The record of runs with real ranks: its figures are those of the steps, and it outlives ranks and sessions."""

from __future__ import annotations

import socket
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ipywidgets
import numpy as np
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from gpumem_nb.report.runs import Row
from gpumem_nb.session import Session
from gpumem_nb.shared import snapshot_folder
from gpumem_nb.shared.errors import InvalidInput, StateFileError
from gpumem_nb.shared.step_times import PARTS
from gpumem_nb.shared.units import format_bytes, format_rate
from gpumem_nb.ui.answers import ExportView
from gpumem_nb.ui.widgets import family
from tests import internals
from tests.cluster.test_magics import run
from tests.cluster.test_snapshots import snapshots
from tests.conftest import ranks
from tests.internals import snapshots_of

pytestmark = pytest.mark.cluster

LIMIT = 96 * 2**20


@pytest.fixture
def session(two_ranks: Session, fresh: Callable[..., Session]) -> Session:
    """Two ranks that have just loaded something."""
    return fresh(two_ranks)


def new_rows(session: Session, since: int) -> list[Row]:
    """Those that the record has besides the first so many."""
    return list(session.runs)[since:]


def test_figures_are_those_of_the_steps(session: Session) -> None:
    known = len(session.runs)
    session.set(ledger_steps=1)  # so the categories are those of the last step
    frames = []
    for knobs in ({"batch_size": 16}, {"batch_size": 32, "checkpointing": "blocks"}):
        session.set(**knobs)
        frames.append(session.train(12).frame())
    session.set(ledger_steps=20)
    rows = new_rows(session, known)
    assert [row.steps for row in rows] == [12, 12]
    assert [row.present for row in rows] == [False, True]
    for row, frame in zip(rows, frames, strict=True):
        assert row.peak_bytes == frame.live_peak_bytes.max()
        assert row.reserved_peak_bytes == frame.reserved_peak_bytes.max()
        assert row.headroom == 1 - frame.reserved_peak_bytes.max() / LIMIT
        judged = frame[frame.step > frame.step.min() + 1]  # two steps warm up
        rates = judged.groupby("step").samples_per_s.sum()
        assert row.samples_per_s == pytest.approx(rates.median())
        last = frame[frame.step == frame.step.max()]
        assert sum(row.categories.values()) == pytest.approx(last.live_peak_bytes.max(), rel=0.01)
        for part in PARTS:
            assert row.parts[part] == pytest.approx(judged[f"{part}_s"].mean()), part
    compared = session.runs.compare(rows[0].number, rows[1].number)
    samples = 12 * 16 * 2
    assert compared.samples == samples
    for row, frame, size in zip(rows, frames, (16, 32), strict=True):
        of_each_sample = np.repeat(frame.groupby("step").loss.mean(), 2 * size)
        exact = of_each_sample[samples * 3 // 4 : samples].mean()
        found = compared.frame().set_index("what").loc["loss", f"run {row.number}"]
        assert found == pytest.approx(exact)
    moved = rows[1].categories["activations"] - rows[0].categories["activations"]
    assert compared.categories["activations"] == moved
    assert "batch_size 16 → 32" in str(compared)


SLOWER = """
import time, torch
scratch = []
def slower(module, args):
    time.sleep(0.05)
    scratch[:] = [torch.ones(6 << 18)]
hook = model.register_forward_pre_hook(slower)
"""


def test_a_run_and_its_row_tell_of_the_steps_since_a_cell_changed_the_model(session: Session) -> None:
    before = session.train(8)
    session.run(SLOWER)
    after = session.train(6)
    session.run("hook.remove(); scratch.clear()")
    for trained, row in zip((before, after), new_rows(session, len(session.runs) - 2), strict=True):
        frame = trained.frame()
        rates = frame.groupby("step").samples_per_s.sum()
        usual = frame[~frame["first"]].groupby("step").samples_per_s.sum()  # the first step of all is no throughput
        assert f"{format_rate(usual.median())} samples/s" in str(trained)
        assert f"live peak {format_bytes(frame.live_peak_bytes.max())}." in str(trained)
        assert (row.steps, row.peak_bytes) == (trained.steps, frame.live_peak_bytes.max())
        assert row.samples_per_s == pytest.approx(rates[2:].median())
    assert (row.peak_bytes or 0) > before.frame().live_peak_bytes.max()


def test_equal_settings_reserve_equal_memory_whatever_ran_before(session: Session) -> None:
    known = len(session.runs)
    session.set(batch_size=8)
    session.train(4)
    session.run("torch.ones(30 << 18); None")
    session.train(2)
    session.set(batch_size=512)
    session.train(2)
    session.memory(timeline=True)
    session.set(batch_size=8)
    session.evaluate()
    session.train(4)
    first, after_a_cell, large, again = new_rows(session, known)
    for row in (after_a_cell, again):
        assert (row.reserved_peak_bytes, row.headroom) == (first.reserved_peak_bytes, first.headroom)
    assert large.headroom
    assert first.headroom
    assert large.headroom < first.headroom
    for row in new_rows(session, known):
        assert (row.reserved_peak_bytes or 0) >= (row.peak_bytes or 0) > 0


def test_a_configuration_that_was_predicted_says_so(session: Session) -> None:
    session.train(6)
    said = session.predict(batch_size=8)
    session.set(batch_size=8)
    session.train(6)
    row = list(session.runs)[-1]
    assert row.foretold
    assert (row.foretold.live_peak_bytes, row.foretold.verdict) == (said.live_peak_bytes, said.verdict)
    assert row.foretold.error == pytest.approx(0, abs=0.02)


@pytest.mark.full
def test_runs_outlive_a_restart_and_are_saved_with_the_state(session: Session, tmp_path: Path) -> None:
    session.train(6)
    session.set(batch_size=8)
    session.train(6)
    first, second = list(session.runs)[-2:]
    session.runs.note(first.number, "the first")
    figures = (first.key, first.peak_bytes, first.samples_per_s, list(first.curve.losses))
    session.save(tmp_path / "x.state")
    session.restart()
    session.train(2)
    *_, again, _, now = session.runs
    assert (again.number, again.note, again.came_from) == (first.number, "the first", "before a restart")
    assert (again.key, again.peak_bytes, again.samples_per_s, list(again.curve.losses)) == figures
    assert (now.number, now.came_from, now.steps, now.present) == (second.number + 1, "", 2, True)
    count = len(session.runs)
    session.resume(tmp_path / "x.state")
    assert len(session.runs) == count, "they are all known"

    internals.stop_running()
    later = ranks(2)
    assert later.load_runs(tmp_path / "x.state").new == second.number
    assert later.workload is None, "nothing else was taken from it"
    later.resume(tmp_path / "x.state")
    later.train(2)
    *_, there, last = later.runs
    assert (there.key, there.came_from, there.present) == (second.key, "x.state", False)
    assert there.reserved_peak_bytes == second.reserved_peak_bytes
    assert (last.number, last.came_from, last.present) == (second.number + 1, "", True)
    later.train(3)
    assert later.runs.compare(there.number, last.number).changed == ""


def test_states_without_runs_are_as_good(session: Session, tmp_path: Path) -> None:
    session.train(3)
    session.set(batch_size=8)  # a snapshot is taken before it
    session.train(1)
    assert 3 in snapshots(session)  # which waits until it is written
    snapshot = snapshot_folder.newest_first(snapshots_of(session).folder)[0]
    count = len(session.runs)
    with pytest.raises(StateFileError, match="holds no runs"):
        session.load_runs(snapshot)
    session.resume(snapshot)
    assert (session.status().steps, len(session.runs)) == (3, count)
    (tmp_path / "theirs.state").write_text("x")
    for path, sentence in (
        (tmp_path / "theirs.state", "is not a training state"),
        (tmp_path / "none", "There is no file"),
    ):
        with pytest.raises(StateFileError, match=sentence):
            session.load_runs(path)


def test_magics_of_runs(
    session: Session, shell: InteractiveShell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = len(session.runs)
    for size in (16, 8):
        session.set(batch_size=size)
        session.train(6)
    a, b = (row.number for row in new_rows(session, known))
    run(shell, f"%hvd_runs --note {b} 'small, but' slow")
    assert session.runs[b].note == "small, but slow"
    capsys.readouterr()
    run(shell, f"%hvd_runs --note {b}")
    assert capsys.readouterr().out == "small, but slow\n"
    assert session.runs[b].note == "small, but slow"
    run(shell, f"%hvd_runs --note {b} ''")
    assert session.runs[b].note == ""
    capsys.readouterr()
    run(shell, f"%hvd_runs --note {b}")
    assert capsys.readouterr().out == f"There is no note on run {b}.\n"
    for note in ("-3% slower", "--faster than before", "it's #1 -- of 2"):
        run(shell, f"%hvd_runs --note {b} {note}")
        assert session.runs[b].note == note
    order = [row.number for row in run(shell, "%hvd_runs --sort batch_size")]
    assert order.index(b) < order.index(a)
    assert f"Run {a} → {b}: batch_size 16 → 8" in str(run(shell, f"%hvd_runs --compare {a} {b}"))
    assert f"Run {a} → {b}" in capsys.readouterr().out, "a terminal gets text"
    assert "Written:" in str(run(shell, f"%hvd_runs --export '{tmp_path}/all runs.csv'"))
    session.save(tmp_path / "x.state")
    run(shell, f"%hvd_runs --load {tmp_path}/x.state")
    assert f"0 runs came from {tmp_path}/x.state." in capsys.readouterr().out
    for line, sentence in (
        ("--sort speed", "There is no column 'speed'"),
        ("--compare 1 2 --export runs.csv", "--export writes all runs, not a comparison"),
        ("--compare 1 99999", "There is no run 99999"),
        ("--note best 3", "'best' is not the number of a run"),
        ("--export runs.txt", "ends in .csv, .parquet or .html"),
    ):
        with pytest.raises(UsageError) as caught:
            run(shell, f"%hvd_runs {line}")
        assert sentence in str(caught.value)


class Text(HTMLParser):
    """What a page says, without its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.said: list[str] = []
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.said.append(data)

    def __str__(self) -> str:
        return " ".join(self.said)


@pytest.mark.full
def test_a_report_is_one_page_of_what_is_known(
    session: Session, shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.train(6)
    session.predict(batch_size=8)
    session.set(batch_size=8)
    session.train(2)
    session.play()
    try:
        monkeypatch.setenv("HOME", str(tmp_path))
        session.runs.note(1, f"<script>alert(1)</script> {tmp_path}/data")
        written = run(shell, f"%hvd_report {tmp_path}/report.html")
        assert session.playing, "training goes on while ranks are asked"
    finally:
        session.pause()
    page = (tmp_path / "report.html").read_text()
    text = str(Text(page))
    for said in ("Session report: digits-resnet", "Runs", "Findings", "Predicted and measured", "torch", "Open MPI"):
        assert said in text, said
    assert "virtual GPU 0 (96.0 MiB)" in text
    assert "<script>alert" not in page
    assert "~/data" in text
    assert str(tmp_path) not in page
    assert socket.gethostname() not in text.split()
    assert written.size_bytes == (tmp_path / "report.html").stat().st_size
    session.report(tmp_path / "report.html")  # its own file may be written over
    (tmp_path / "theirs.html").write_text("<html>")
    for path, sentence in (
        (tmp_path / "report.pdf", "a report is a page"),
        (tmp_path / "nowhere" / "report.html", "there is no such folder"),
        (tmp_path / "theirs.html", "already exists and is not such a file"),
        ("", "is not a file's path"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            session.report(path)


@pytest.mark.full
def test_the_panels_button_says_what_is_examined_for_its_report_and_can_be_stopped(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.train(6)
    monkeypatch.chdir(tmp_path)
    view = ExportView(session, lambda ask: ask(), lambda ask: ask(), lambda: None)
    buttons = {one.description: one for one in family(view.widget) if isinstance(one, ipywidgets.Button)}
    said: list[str] = []
    region = next(one for one in family(view.widget) if "gpumem-searching" in one._dom_classes)
    region.observe(lambda change: said.append(change.new), "html")
    buttons["Write report.html"].click()
    assert any("what ranks hold" in one for one in said)
    assert "Not examined" not in (tmp_path / "report.html").read_text()
    region.observe(lambda change: "the ranks" in change.new and buttons["Stop"].click(), "html")
    buttons["Write report.html"].click()
    assert "Not examined: interrupted." in (tmp_path / "report.html").read_text()


@pytest.mark.full
def test_a_session_that_is_over_can_be_reported(session: Session, shell: InteractiveShell, tmp_path: Path) -> None:
    loss = session.train(6).frame().query("step == 6").loss.mean()
    evaluated = session.evaluate()
    session.stop()
    session.report(tmp_path / "over.html")
    page = (tmp_path / "over.html").read_text()
    assert "6 steps on 2 ranks" in page
    assert f"Loss of the latest step: {loss:.4g}. Validation after step 6: {evaluated.numbers}" in page
    assert "plotly-graph-div" in page
    assert "Could not be examined: " in page
    assert len(session.runs)
    run(shell, f"%hvd_report {tmp_path}/again.html")  # which was typed too late
    run(shell, "%hvd_runs --note 1 kept")
    assert run(shell, "%hvd_runs")[1].note == "kept"
    assert run(shell, f"%hvd_runs --export {tmp_path}/runs.csv").size_bytes
    for line in ("%hvd_train", f"%hvd_runs --load {tmp_path}/x.state", "%hvd_runs --pin"):
        with pytest.raises(UsageError, match="No ranks are running"):
            run(shell, line)


@pytest.mark.full
def test_without_a_step_there_is_nothing_to_draw(two_ranks: Session, tmp_path: Path) -> None:
    internals.stop_running()
    session = ranks(2)
    session.report(tmp_path / "empty.html")
    text = str(Text((tmp_path / "empty.html").read_text()))
    assert "Session report: no workload" in text
    assert "no step was done" in text
    assert "Nothing has been tried yet" in text
