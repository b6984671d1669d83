"""What doctor and tuner have answered stands below the record of runs, and in a report, with step and time."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from gpumem_nb.kernel.questions import tuning
from gpumem_nb.kernel.questions.fitting import Changed
from gpumem_nb.kernel.record import Record
from gpumem_nb.report.runs import Runs
from gpumem_nb.shared.settings import Settings
from gpumem_nb.shared.workload import Splits
from gpumem_nb.ui import report_page
from tests.ledgers import info
from tests.runs import history_of, train
from tests.unit.tuned_machine import WORKLOAD


def recorded(*answers: tuple[str, str]) -> tuple[Record, Runs]:
    """A record of ten steps of a model, after which these were answered."""
    history, record = history_of(), Record()
    record.follow(history, info())
    train(history, Settings(), [1.0] * 10)
    for who, said in answers:
        record.answered(who, said, 10, "mine")
    return record, Runs(record.rows(), answers=record.answers)


def test_answers_stand_below_the_table_with_their_step_and_time() -> None:
    _, runs = recorded(("tuner", "checkpointing blocks → none: 900 samples/s."), ("doctor", "Nothing found."))
    below = str(runs).splitlines()[-2:]
    assert re.fullmatch(r"The tuner after step 10 of mine, at \d\d:\d\d: checkpointing blocks → none: 900 .*", below[0])
    assert below[1].endswith(": Nothing found.")
    assert "The doctor after step 10 of mine" in runs._repr_html_()
    assert "The doctor after" in str(runs.sorted("loss").latest(1)), "whatever rows are shown"


def test_of_many_answers_the_latest_are_shown_and_long_ones_in_short() -> None:
    _, runs = recorded(*[("doctor", f"Answer {number}.") for number in range(4)], ("tuner", "word " * 200))
    assert [number for number in range(4) if f"Answer {number}." in str(runs)] == [2, 3]
    assert "2 earlier answers: %hvd_report report.html has all." in str(runs)
    assert str(runs).endswith("word …")


def test_answers_outlive_a_restart_and_change_what_is_shown() -> None:
    record, _ = recorded(("doctor", "Nothing found."))
    before = record.version
    record.answered("tuner", "Faster.", 10, "mine")
    assert record.version != before
    record.follow(history_of(), info())
    assert [one.said for one in record.answers] == ["Nothing found.", "Faster."]


def test_a_report_has_all_answers_in_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    history = history_of()
    _, runs = recorded(*[("doctor", f"Answer {number} <of> many.") for number in range(5)])
    session: Any = SimpleNamespace(workload=None, history=history, runs=runs, ranks=(info(0), info(1)), size=2)
    monkeypatch.setattr(report_page, "_charts", lambda session: ("", ""))
    page = report_page.report_page(session, "", SimpleNamespace(scored=()), {})  # type: ignore[arg-type]
    assert "<h2>Answers of doctor and tuner</h2>" in page
    assert all(page.count(f"Answer {number} &lt;of&gt; many.") == 1 for number in range(5)), "and not below the runs"
    without: Any = SimpleNamespace(workload=None, history=history, runs=Runs(runs.rows), ranks=(info(0),), size=1)
    assert "Answers of" not in report_page.report_page(without, "", SimpleNamespace(scored=()), {})  # type: ignore[arg-type]


def test_an_answer_of_the_tuner_is_kept_with_the_workload_that_it_was_about(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record()
    history = history_of()
    record.follow(history, info())
    train(history, Settings(), [1.0] * 10)

    def load_another(*_: object) -> None:
        train(history, Settings(), [1.0] * 3, workload="other")
        raise Changed("something was loaded.")

    monkeypatch.setattr(tuning, "search", load_another)
    cluster = MagicMock(history=history, record=record)
    cluster.training.workload, cluster.training.settings = WORKLOAD, Settings()
    cluster.predicting.splits.return_value = Splits(mean=True)
    tuning.Tuning(cluster).tune(None, None, 60.0, None, True, lambda what, done: None, lambda settings: print)
    [kept] = record.answers
    assert (kept.workload, kept.step) == (WORKLOAD.name, 10)
    assert "something was loaded" in kept.said
